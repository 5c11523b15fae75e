"""Phi-3 and Phi-4: Llama with fused projections."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture
from adapters.attention import Projection
from adapters.config import first
from adapters.families.llama import llama_like
from adapters.registry import register
from adapters.views import columns


@register("Phi3PreTrainedModel")
def phi3(config: Any) -> Architecture:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    d_head = first(config, "head_dim") or config.hidden_size // heads
    d_mlp = config.intermediate_size
    keys, values, end = heads * d_head, (heads + kv_heads) * d_head, (heads + 2 * kv_heads) * d_head
    attn = {
        "q": Projection("qkv_proj", columns(0, keys, heads)),
        "k": Projection("qkv_proj", columns(keys, values, kv_heads)),
        "v": Projection("qkv_proj", columns(values, end, kv_heads)),
        "out": "resid_attn_dropout",
        "out_key": None,
    }
    mlp = MLP(
        "mlp",
        up=Projection("gate_up_proj", columns(d_mlp, 2 * d_mlp)),
        gate=Projection("gate_up_proj", columns(0, d_mlp)),
        down="down_proj",
        out="resid_mlp_dropout",
    )
    return llama_like(config, attn=attn, block={"mlp": mlp})
