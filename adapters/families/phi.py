"""Phi (1, 1.5 and 2)."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.config import rotary_facts
from adapters.norms import LAYER_NORM
from adapters.registry import register


@register("PhiPreTrainedModel")
def phi(config: Any) -> Architecture:
    normed = config.qk_layernorm
    return Architecture(
        embed="embed_tokens",
        blocks="layers",
        block=Block(
            ln1="input_layernorm",
            attn=Attention(
                "self_attn",
                Projection("q_proj"),
                Projection("k_proj"),
                Projection("v_proj"),
                o="dense",
                rotary=True,
                q_norm="q_layernorm" if normed else None,
                k_norm="k_layernorm" if normed else None,
                norm_heads_first=True,
            ),
            mlp=MLP("mlp", up=Projection("fc1"), down="fc2"),
            qk_norm=LAYER_NORM if normed else None,
            parallel=True,
            shared_norm=True,
        ),
        final_norm="final_layernorm",
        unembed="lm_head",
        facts=rotary_facts(config),
    )
