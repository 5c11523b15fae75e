"""XGLM and BioGPT: GPT-2 with a projection each, and layers that stand in the block itself."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.gpt2 import K, Q, V, gpt2_like
from adapters.feed_forward import MLP
from adapters.registry import only
from adapters.views import Composed, HeadsOfBatch, MaskedScores


def xglm(config: PreTrainedConfig) -> Architecture:
    only(config, add_cross_attention=False)
    return _declared("lm_head", heads=config.attention_heads, d_mlp=config.ffn_dim)


def biogpt(config: PreTrainedConfig) -> Architecture:
    return _declared("output_projection", heads=None, d_mlp=config.intermediate_size)


def _declared(unembed: str, *, heads: int | None, d_mlp: int) -> Architecture:
    scores = MaskedScores() if heads is None else Composed(HeadsOfBatch(heads), MaskedScores())
    return gpt2_like(
        Attention("self_attn", Q, K, V, o="out_proj", scores=scores),
        MLP("", up=Projection("fc1"), down="fc2"),
        out=(None, "fc2"),
        pre=("self_attn_layer_norm", "final_layer_norm"),
        path="layers",
        final_norm="layer_norm",
        embed="embed_tokens",
        pos_embed="embed_positions",
        unembed=unembed,
        config_values={"d_mlp": d_mlp},
    )
