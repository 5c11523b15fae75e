"""dots.llm1, and other mixtures of experts behind Llama's attention."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import NORMED_ATTENTION, NORMED_WIDTH
from adapters.families.shapes.mixture import SHARED, SIGMOID, dense_first, dense_listed, mixture_like
from adapters.feed_forward import MoE
from adapters.registry import only


def dots1(config: PreTrainedConfig) -> Architecture:
    width, dense = config.moe_intermediate_size, dense_first(config)
    shared = width * config.n_shared_experts
    return mixture_like(config, SIGMOID, config.n_routed_experts, width, shared, dense=dense, attn=NORMED_ATTENTION)


def solar_open(config: PreTrainedConfig) -> Architecture:
    width = config.moe_intermediate_size
    return mixture_like(config, SIGMOID, config.n_routed_experts, width, width * config.n_shared_experts)


def minimax_m2(config: PreTrainedConfig) -> Architecture:
    moe = replace(SIGMOID, shared=None)
    return mixture_like(config, moe, config.num_local_experts, config.intermediate_size, attn=NORMED_WIDTH)


def aria_text(config: PreTrainedConfig) -> Architecture:
    only(config, hidden_act="silu")  # its experts have that, whatever its configuration says
    width = config.intermediate_size
    moe = MoE("mlp", router="router", chosen_by="logits", shared=SHARED)
    n, shared = config.moe_num_experts, width * config.moe_num_shared_experts
    return mixture_like(config, moe, n, width, shared, per_token=config.moe_topk)


def mellum(config: PreTrainedConfig) -> Architecture:
    width, dense = config.moe_intermediate_size, dense_listed(config)
    moe = MoE("mlp", router="gate")
    return mixture_like(config, moe, config.num_experts, width, dense=dense, attn=NORMED_ATTENTION)
