"""Phi-3 and Phi-4: Llama with fused projections."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Projection
from adapters.config import first
from adapters.families.shapes.llama import ATTENTION, fused_gate, llama_like
from adapters.feed_forward import MLP
from adapters.views import columns


def phi3(config: PreTrainedConfig) -> Architecture:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    d_head = first(config, "head_dim") or config.hidden_size // heads
    keys, values, end = heads * d_head, (heads + kv_heads) * d_head, (heads + 2 * kv_heads) * d_head
    attn = replace(
        ATTENTION,
        q=Projection("qkv_proj", columns(0, keys, heads)),
        k=Projection("qkv_proj", columns(keys, values, kv_heads)),
        v=Projection("qkv_proj", columns(values, end, kv_heads)),
    )
    gate, up = fused_gate("gate_up_proj", config.intermediate_size)
    mlp = MLP("mlp", up=up, gate=gate, down="down_proj")
    return llama_like(config, attn=attn, mlp=mlp, out=("resid_attn_dropout", "resid_mlp_dropout"))
