"""EXAONE: Llama with norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import NORMED_ATTENTION, llama_like
from adapters.families.shapes.mixture import SIGMOID, dense_listed, mixture_like
from adapters.registry import register

ATTENTION = replace(NORMED_ATTENTION, qk_norm_over="heads first")
POST = ("post_attention_layernorm", "post_feedforward_layernorm")


@register("Exaone4PreTrainedModel")
def exaone4(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=ATTENTION, pre=(None, None), post=POST)


@register("ExaoneMoePreTrainedModel")
def exaone_moe(config: PreTrainedConfig) -> Architecture:
    width = config.moe_intermediate_size
    shared, dense = width * config.num_shared_experts, dense_listed(config)
    return mixture_like(config, SIGMOID, config.num_experts, width, shared, dense=dense, attn=ATTENTION)
