"""T5 (and v1.1), encoder and decoder."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block, Stack
from adapters.attention import Attention, Projection
from adapters.encoder_decoder import encoder_decoder_points, encoder_decoder_weights
from adapters.norms import RMS_NORM
from adapters.registry import register


def _block(layers: int, gated: bool, **more: Any) -> Block:
    """A block of so many layers, of which the first is attention and the last is the MLP."""
    last = f"layer.{layers - 1}"
    up, gate = (Projection("wi_1"), Projection("wi_0")) if gated else (Projection("wi"), None)
    mlp = MLP(f"{last}.DenseReluDense", up=up, gate=gate, down="wo", out=f"{last}.dropout")
    norms: dict[str, Any] = {f"ln{i + 1}": f"layer.{i}.layer_norm" for i in range(layers)}
    attn = _attention("layer.0.SelfAttention", "layer.0.dropout", "attn")
    return Block(attn=attn, mlp=mlp, **norms, norm=RMS_NORM, output_key=0, output_length=3, **more)


def _attention(path: str, out: str, name: str) -> Attention:
    return Attention(path, Projection("q"), Projection("k"), Projection("v"), o="o", out=out, out_key=None, name=name)


@register("T5PreTrainedModel")
def t5(config: Any) -> Architecture:
    cross = _attention("layer.1.EncDecAttention", "layer.1.dropout", "cross_attn")
    blocks = {"encoder": _block(2, config.is_gated_act), "decoder": _block(3, config.is_gated_act, cross_attn=cross)}
    stacks = {
        name: Stack(f"{name}.block", block, f"{name}.embed_tokens", f"{name}.final_layer_norm")
        for name, block in blocks.items()
    }
    encoder = stacks["encoder"]
    return Architecture(
        stacks=stacks,
        embed=encoder.embed,
        blocks=encoder.blocks,
        block=encoder.block,
        final_norm=encoder.final_norm,
        unembed="lm_head",
        no_layer_runs="all layers use its first layer's position bias, and its decoder needs the encoder's output",
        points=encoder_decoder_points,
        weights=encoder_decoder_weights,
        facts={
            "attention_dir": "bidirectional",
            "positional_embedding_type": "relative_positional_bias",
            "d_mlp": config.d_ff,
            "act_fn": config.dense_act_fn,
            "use_attn_scale": False,
            "attn_scale": 1.0,
            "relative_attention_num_buckets": config.relative_attention_num_buckets,
            "relative_attention_max_distance": config.relative_attention_max_distance,
            "decoder_start_token_id": config.decoder_start_token_id,
        },
    )
