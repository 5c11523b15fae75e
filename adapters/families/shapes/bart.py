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
    """An encoder and a decoder, or, by their configuration, the decoder as a language model.

    Args:
        config: the Hugging Face configuration.
        on_stream: norms stand on the stream itself, not before each part.
        final: there is a norm behind the last block.
        embed_norm: there is one of the sum of the embeddings.
        scales: where the configuration asks for it, the model multiplies the embedding, not the embedding's module.
        hears: its encoder begins with sound, not with tokens.
    """
    alone = not config.is_encoder_decoder  # the decoder as a language model
    names = ("decoder",) if alone else ("encoder", "decoder")
    factor = config.d_model**0.5 if scales and config.scale_embedding else 1.0
    width = config.decoder_ffn_dim if alone else config.encoder_ffn_dim
    own = None if config.decoder_ffn_dim == width else config.decoder_ffn_dim
    heads_differ = config.decoder_attention_heads != config.encoder_attention_heads and not alone
    stacks = [
        _stack(
            name, on_stream, _embedding(name, embed_norm, factor), final=final, alone=alone,
            d_mlp=own if name == "decoder" else None,
            heads=(config.decoder_attention_heads, config.d_model) if heads_differ and name == "decoder" else None,
        )
        for name in names
    ]  # fmt: skip
    if hears:
        stacks[0] = replace(stacks[0], embedding=Embedding())
    start = (
        {"n_heads": config.decoder_attention_heads}
        if alone
        else {"decoder_start_token_id": getattr(config, "decoder_start_token_id", None)}
    )
    return Architecture(
        stacks=tuple(stacks),
        readout=Readout("lm_head", output_transform=Affine(plus=None if alone else "final_logits_bias")),
        no_layer_runs="" if alone else "its decoder needs the encoder's output",
        config_values={"d_mlp": width, "attention_dir": "causal" if alone else "bidirectional", **start},
    )


def _embedding(name: str, normed: bool, factor: float) -> Embedding:
    """Tokens and positions, and the norm of their sum."""
    norm = Norm(f"{name}.layernorm_embedding", LAYER_NORM) if normed else None
    tokens, positions = f"{name}.embed_tokens", f"{name}.embed_positions"
    module = None if norm is None else norm.path
    return Embedding(tokens, times(factor), added=tables(positions), norm=norm, module=module)


def _stack(
    name: str,
    on_stream: bool,
    embedding: Embedding,
    *,
    final: bool,
    alone: bool,
    d_mlp: int | None,
    heads: tuple[int, int] | None,
) -> Stack:
    """The encoder, or the decoder, which attends to it where it does not stand `alone`.

    `heads`, where a decoder has another number of them than its encoder: how many, and the width of all together.
    """
    width = None if heads is None else heads[1] // heads[0]
    q, k, v = (Projection(f"{letter}_proj", width=width) for letter in "qkv")
    attends = Attention("self_attn", q, k, v, o="out_proj")
    if heads is not None:
        attends = replace(attends, config_values={"n_heads": heads[0], "n_key_value_heads": heads[0]})
    parts: list[tuple[Attention | MLP, str]] = [(attends, "self_attn_layer_norm")]
    if name == "decoder" and not alone:
        parts.append((replace(attends, path="encoder_attn", keys_from="encoder"), "encoder_attn_layer_norm"))
    parts.append((MLP("", up=Projection("fc1", width=d_mlp), down="fc2"), "final_layer_norm"))
    norms = [Norm(path, LAYER_NORM) for _, path in parts]
    outs = [None if part.path else "fc2" for part, _ in parts]
    steps = [
        Step(part, stream_norm=norm, out=out) if on_stream else Step(part, pre=norm, out=out)
        for (part, _), norm, out in zip(parts, norms, outs, strict=True)
    ]
    last = Norm(f"{name}.layer_norm", LAYER_NORM) if final else None
    return Stack(f"{name}.layers", Block(tuple(steps)), {}, last, embedding, "blocks" if alone else name)
