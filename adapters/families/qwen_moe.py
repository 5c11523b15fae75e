"""Qwen's mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Gate, Projection
from adapters.families.qwen import VALUES
from adapters.families.shapes.llama import ATTENTION, FEED_FORWARD, NORMED_ATTENTION
from adapters.families.shapes.mixture import mixture_like
from adapters.feed_forward import MoE


def qwen2_moe(config: PreTrainedConfig) -> Architecture:
    shared = replace(FEED_FORWARD, path="shared_expert", flat=True)
    moe = MoE(
        "mlp", router="gate", shared=shared, shared_transform=(Gate(Projection("shared_expert_gate"), "sigmoid"),)
    )
    return sparse_steps(config, ATTENTION, moe, config.shared_expert_intermediate_size)


def qwen3_moe(config: PreTrainedConfig) -> Architecture:
    return sparse_steps(config, NORMED_ATTENTION, MoE("mlp", router="gate"))


def qwen3_vl_moe(config: PreTrainedConfig) -> Architecture:
    values = VALUES | {"use_local_attn": False, "window_size": None, "attn_types": None}  # its configuration has one
    return sparse_steps(config, NORMED_ATTENTION, MoE("mlp", router="gate"), None, values)


def sparse_steps(
    config: PreTrainedConfig,
    attn: Attention,
    moe: MoE,
    d_shared_expert: int | None = None,
    said: Mapping[str, object] = VALUES,
) -> Architecture:
    """A mixture in each layer, but for those that the configuration excepts."""
    step, excepted = config.decoder_sparse_step, config.mlp_only_layers
    mixed = [
        config.num_experts > 0 and i not in excepted and (i + 1) % step == 0 for i in range(config.num_hidden_layers)
    ]
    dense = [index for index, mixes in enumerate(mixed) if not mixes]
    return mixture_like(
        config,
        moe,
        config.num_experts,
        config.moe_intermediate_size,
        d_shared_expert,
        dense=dense,
        attn=attn,
        config_values=said,
    )
