"""Phi (1, 1.5 and 2)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register


@register("PhiPreTrainedModel")
def phi(config: PreTrainedConfig) -> Architecture:
    normed = config.qk_layernorm
    attn = Attention(
        "self_attn",
        Projection("q_proj"),
        Projection("k_proj"),
        Projection("v_proj"),
        o="dense",
        rotary=True,
        q_norm=Norm("q_layernorm", LAYER_NORM) if normed else None,
        k_norm=Norm("k_layernorm", LAYER_NORM) if normed else None,
        qk_norm_over="heads first",
    )
    norm = Norm("input_layernorm", LAYER_NORM)
    mlp = MLP("mlp", up=Projection("fc1"), down="fc2")
    block = Block((Step(attn, pre=norm), Step(mlp, pre=norm, parallel=True)))
    return Architecture(
        embed="embed_tokens",
        stacks=(Stack("layers", block, final_norm=Norm("final_layernorm", LAYER_NORM)),),
        unembed="lm_head",
        config_values=rotary_values(config),
    )
