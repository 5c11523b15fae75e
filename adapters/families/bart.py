"""BART, and other encoders and decoders that have the names of its modules."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.families.shapes.bart import bart_like
from adapters.feed_forward import MLP
from adapters.imports import outputs_of_t5_encoder
from adapters.norms import RMS_NORM, Norm
from adapters.registry import only


def bart(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=True, final=False, embed_norm=True)


def blenderbot_small(config: PreTrainedConfig) -> Architecture:
    # Its decoder norms the tokens and then adds the positions: without an encoder, no norm reads
    # their sum.
    only(config, is_encoder_decoder=True, scale_embedding=False)
    return bart(config)


def marian(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=True, final=False, embed_norm=False, scales=True)


def mbart(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=False, final=True, embed_norm=True)


def m2m_100(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=False, final=True, embed_norm=False)


def pegasus(config: PreTrainedConfig) -> Architecture:
    return bart_like(config, on_stream=False, final=True, embed_norm=False, scales=True)


# --------------------------------------------------------------------------------------------------
# T5 (and v1.1), encoder and decoder.
# --------------------------------------------------------------------------------------------------


def _attention(layer: int, module: str, cross: bool = False) -> Attention:
    q, k, v = map(Projection, "qkv")
    path = f"layer.{layer}.{module}"
    if cross:
        return Attention(path, q, k, v, o="o", keys_from="encoder")
    return Attention(path, q, k, v, o="o", position_bias="relative_attention_bias")


def _stack(name: str, *parts: Attention | MLP, outputs: int = 3) -> Stack:
    steps = []
    for i, part in enumerate(parts):
        norm = Norm(f"layer.{i}.layer_norm", RMS_NORM)
        steps.append(Step(part, pre=norm, out=f"layer.{i}.dropout"))
    block = Block(tuple(steps))
    final_norm = Norm(f"{name}.final_layer_norm", RMS_NORM)
    embedding = Embedding(f"{name}.embed_tokens")
    return Stack(f"{name}.block", block, {}, final_norm, embedding, name, (0, outputs))


def t5(config: PreTrainedConfig) -> Architecture:
    return _declared(config, config.d_model**-0.5 if config.scale_decoder_outputs else 1.0)


def mt5(config: PreTrainedConfig) -> Architecture:
    return _declared(config, 1.0)


def _declared(config: PreTrainedConfig, factor_in: float) -> Architecture:
    up, gate = Projection("wi"), None
    if config.is_gated_act:
        up, gate = Projection("wi_1"), Projection("wi_0")
    mlps = [MLP(f"layer.{i}.DenseReluDense", up=up, gate=gate, down="wo") for i in range(3)]
    attn = _attention(0, "SelfAttention")
    cross = _attention(1, "EncDecAttention", cross=True)
    encoder = _stack("encoder", attn, mlps[1], outputs=outputs_of_t5_encoder())
    decoder = _stack("decoder", attn, cross, mlps[2])
    return Architecture(
        stacks=(encoder, decoder),
        readout=Readout("lm_head", factor_in=factor_in),
        no_layer_runs=(
            "all layers use its first layer's position bias, and its decoder needs the encoder's"
            " output"
        ),
        config_values={
            "attention_dir": "bidirectional",
            "positional_embedding_type": "relative_positional_bias",
            "d_mlp": config.d_ff,
            "act_fn": config.dense_act_fn,
            "use_attn_scale": False,
            "attn_scale": 1.0,
            "relative_attention_num_buckets": config.relative_attention_num_buckets,
            "relative_attention_max_distance": config.relative_attention_max_distance,
            "decoder_start_token_id": getattr(config, "decoder_start_token_id", None),
        },
    )


# --------------------------------------------------------------------------------------------------
# Whisper, and Speech2Text: an encoder of sound, and a decoder that transcribes it.
# --------------------------------------------------------------------------------------------------


def whisper(config: PreTrainedConfig) -> Architecture:
    hears = config.is_encoder_decoder  # or its decoder alone, as a language model
    declared = bart_like(config, on_stream=False, final=True, embed_norm=False, hears=hears)
    readout = replace(declared.readout, path="proj_out")
    # Its tokenizer puts the start tokens of a transcript before a text.
    values = {"n_ctx": config.max_target_positions, "default_prepend_bos": False}
    return replace(declared, readout=readout, config_values={**declared.config_values, **values})


def speech_to_text(config: PreTrainedConfig) -> Architecture:
    declared = bart_like(
        config, on_stream=False, final=True, embed_norm=False, scales=True, hears=True
    )
    values = {**declared.config_values, "n_ctx": config.max_target_positions}
    return replace(declared, config_values=values)
