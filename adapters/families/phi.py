"""Phi (1, 1.5 and 2)."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.families.shapes.gpt2 import K, Q, V, gpt2_like
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register


@register("PhiPreTrainedModel")
def phi(config: PreTrainedConfig) -> Architecture:
    q_norm, k_norm = (Norm(f"{letter}_layernorm", LAYER_NORM) if config.qk_layernorm else None for letter in "qk")
    attn = Attention("self_attn", Q, K, V, o="dense", rotary=True, q_norm=q_norm, k_norm=k_norm)
    return gpt2_like(
        replace(attn, qk_norm_over="heads first"),
        MLP("mlp", up=Projection("fc1"), down="fc2"),
        pre=("input_layernorm", "input_layernorm"),
        parallel=True,
        path="layers",
        final_norm="final_layernorm",
        embed="embed_tokens",
        config_values=rotary_values(config),
    )
