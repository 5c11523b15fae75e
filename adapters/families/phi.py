"""Phi (1, 1.5 and 2)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.families.shapes.gpt2 import K, Q, V, gpt2_like
from adapters.families.shapes.llama import normed
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM


def phi(config: PreTrainedConfig) -> Architecture:
    attn = Attention("self_attn", Q, K, V, o="dense", rotary="last", norms_over="heads first")
    if config.qk_layernorm:
        attn = normed(attn, "q_layernorm", "k_layernorm", LAYER_NORM)
    return gpt2_like(
        attn,
        MLP("mlp", up=Projection("fc1"), down="fc2"),
        pre=("input_layernorm", "input_layernorm"),
        parallel=True,
        path="layers",
        final_norm="final_layernorm",
        embed="embed_tokens",
        config_values=rotary_values(config),
    )
