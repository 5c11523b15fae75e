"""XGLM and BioGPT: GPT-2 with a projection each, and layers that stand in the block itself."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import only, register


@register("XGLMPreTrainedModel")
def xglm(config: PreTrainedConfig) -> Architecture:
    only(config, add_cross_attention=False)
    return _declared("lm_head", flat_heads=True, d_mlp=config.ffn_dim)


@register("BioGptPreTrainedModel")
def biogpt(config: PreTrainedConfig) -> Architecture:
    return _declared("output_projection", flat_heads=False, d_mlp=config.intermediate_size)


def _declared(unembed: str, *, flat_heads: bool, d_mlp: int) -> Architecture:
    q, k, v = (Projection(f"{letter}_proj") for letter in "qkv")
    attn = Attention("self_attn", q, k, v, o="out_proj", flat_heads=flat_heads)
    mlp = MLP("", up=Projection("fc1"), down="fc2", out="fc2")
    norms = Norm("self_attn_layer_norm", LAYER_NORM), Norm("final_layer_norm", LAYER_NORM)
    return Architecture(
        embed="embed_tokens",
        pos_embed="embed_positions",
        stacks=(
            Stack(
                "layers",
                Block((Step(attn, pre=norms[0]), Step(mlp, pre=norms[1]))),
                final_norm=Norm("layer_norm", LAYER_NORM),
            ),
        ),
        unembed=unembed,
        config_values={"d_mlp": d_mlp},
    )
