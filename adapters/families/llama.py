"""Llama and the families that have its shape."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.config import rotary_facts
from adapters.norms import RMS_NORM
from adapters.registry import register


@register("LlamaPreTrainedModel", "MistralPreTrainedModel", "Qwen2PreTrainedModel")
def llama(config: Any) -> Architecture:
    return Architecture(
        embed="embed_tokens",
        blocks="layers",
        block=Block(
            ln1="input_layernorm",
            attn=Attention(
                "self_attn", Projection("q_proj"), Projection("k_proj"), Projection("v_proj"), o="o_proj", rotary=True
            ),
            ln2="post_attention_layernorm",
            mlp=MLP("mlp", up=Projection("up_proj"), gate=Projection("gate_proj"), down="down_proj"),
            norm=RMS_NORM,
        ),
        final_norm="norm",
        unembed="lm_head",
        facts=rotary_facts(config),
    )
