"""EXAONE: Llama with norms of queries and keys."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import HEADS_FIRST, POST, llama_like
from adapters.families.shapes.mixture import SIGMOID, dense_listed, mixture_like


def exaone4(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=HEADS_FIRST, pre=(None, None), post=POST)


def exaone_moe(config: PreTrainedConfig) -> Architecture:
    width = config.moe_intermediate_size
    shared, dense = width * config.num_shared_experts, dense_listed(config)
    return mixture_like(config, SIGMOID, config.num_experts, width, shared, dense=dense, attn=HEADS_FIRST)
