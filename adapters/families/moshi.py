"""Moshi's language model: Llama with gate and up in one projection."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.llama import fused_gate, llama_like
from adapters.feed_forward import MLP


def moshi(config: PreTrainedConfig) -> Architecture:
    width = config.ffn_dim // 2
    q, k, v = (Projection(f"{letter}_proj.linear") for letter in "qkv")
    gate, up = fused_gate("fc1", width)
    return llama_like(
        config,
        attn=Attention("self_attn", q, k, v, o="o_proj.linear", rotary="last"),
        mlp=MLP("mlp", up=up, gate=gate, down="fc2"),
        # Its configuration has a window, which it does not use.
        config_values={"d_mlp": width, "use_local_attn": False, "window_size": None, "attn_types": None},
    )
