"""Hunyuan: Llama with norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import ATTENTION, FEED_FORWARD, HEADS_FIRST, llama_like, normed
from adapters.families.shapes.mixture import FLAT_SIGMOID, dense_listed, mixture_like
from adapters.feed_forward import MoE
from adapters.registry import only

#: Queries and keys are rotated first, and then normed.
NORMED_LAST = replace(normed(ATTENTION, "query_layernorm", "key_layernorm"), norms_over="heads first", rotary="first")


def hunyuan(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_LAST)


def hunyuan_moe(config: PreTrainedConfig) -> Architecture:
    n, per_token, width = config.num_experts, config.moe_topk, config.intermediate_size
    if isinstance(per_token, list):  # a number of its own for each layer
        only(config, moe_topk=None)
    moe = MoE("mlp", router="gate", shared=replace(FEED_FORWARD, path="shared_mlp"))
    return mixture_like(config, moe, n, width, width, per_token=per_token, attn=NORMED_LAST)


def hy_v3(config: PreTrainedConfig) -> Architecture:
    width, dense = config.moe_intermediate_size, dense_listed(config)
    shared = width * config.num_shared_experts
    return mixture_like(config, FLAT_SIGMOID, config.num_experts, width, shared, dense=dense, attn=HEADS_FIRST)
