"""BART's shape: an encoder, and a decoder that attends to it; or the decoder alone."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step, tables
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.views import Affine, times


def bart_like(
    config: PreTrainedConfig,
    *,
    on_stream: bool,
    final: bool,
    embed_norm: bool,
    scales: bool = False,
    hears: bool = False,
) -> Architecture:
    """Declare an encoder and a decoder, or, by their configuration, the decoder as a language
    model.

    Args:
        config: the Hugging Face configuration.
        on_stream: norms are applied to the stream itself, not before each part.
        final: there is a norm after the last block.
        embed_norm: there is a norm of the sum of the embeddings.
        scales: where the configuration enables it, the model itself scales the embedding, not the
            embedding's module.
        hears: its encoder reads sound, not tokens.
    """
    alone = not config.is_encoder_decoder  # the decoder as a language model
    names = ["decoder"] if alone else ["encoder", "decoder"]
    factor = config.d_model**0.5 if scales and config.scale_embedding else 1.0
    width = config.decoder_ffn_dim if alone else config.encoder_ffn_dim
    own = None if config.decoder_ffn_dim == width else config.decoder_ffn_dim
    heads_differ = config.decoder_attention_heads != config.encoder_attention_heads and not alone
    stacks = []
    for name in names:
        is_decoder = name == "decoder"
        attn = _attention(config if heads_differ and is_decoder else None)
        parts: list[Attention | MLP] = [attn]
        if is_decoder and not alone:
            parts.append(replace(attn, path="encoder_attn", keys_from="encoder"))
        up = Projection("fc1", width=own if is_decoder else None)
        parts.append(MLP("", up=up, down="fc2"))
        stacks.append(
            Stack(
                f"{name}.layers",
                _block(parts, on_stream),
                final_norm=Norm(f"{name}.layer_norm", LAYER_NORM) if final else None,
                embedding=_embedding(name, embed_norm, factor),
                name="blocks" if alone else name,
            )
        )
    if hears:
        stacks[0] = replace(stacks[0], embedding=Embedding())
    values = {"d_mlp": width, "attention_dir": "bidirectional"}
    if alone:
        values |= {"attention_dir": "causal", "n_heads": config.decoder_attention_heads}
    else:
        values["decoder_start_token_id"] = getattr(config, "decoder_start_token_id", None)
    bias = Affine(plus=None if alone else "final_logits_bias")
    return Architecture(
        tuple(stacks),
        Readout("lm_head", output_transform=bias),
        no_layer_runs="" if alone else "its decoder needs the encoder's output",
        config_values=values,
    )


def _attention(config: PreTrainedConfig | None) -> Attention:
    """Declare self-attention.

    Args:
        config: the configuration; if the decoder has a different number of heads from the encoder,
            the decoder's attention is declared.
    """
    width = None
    values: dict[str, object] = {}
    if config is not None:
        n = config.decoder_attention_heads
        width = config.d_model // n
        values = {"n_heads": n, "n_key_value_heads": n}
    q, k, v = (Projection(f"{letter}_proj", width=width) for letter in "qkv")
    return Attention("self_attn", q, k, v, o="out_proj", config_values=values)


def _block(parts: list[Attention | MLP], on_stream: bool) -> Block:
    """Declare a block; each part has a norm, before it or on the stream after it."""
    steps = []
    for part in parts:
        norm = Norm(f"{part.path or 'final'}_layer_norm", LAYER_NORM)
        step = Step(part, out=None if part.path else "fc2")
        steps.append(replace(step, stream_norm=norm) if on_stream else replace(step, pre=norm))
    return Block(tuple(steps))


def _embedding(name: str, normed: bool, factor: float) -> Embedding:
    """Declare tokens and positions, and the norm of their sum."""
    path = f"{name}.layernorm_embedding" if normed else None
    return Embedding(
        f"{name}.embed_tokens",
        times(factor),
        added=tables(f"{name}.embed_positions"),
        norm=Norm(path, LAYER_NORM) if path else None,
        module=path,
    )
