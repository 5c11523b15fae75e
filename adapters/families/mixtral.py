"""Mixtral."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.mixture import mixture_like
from adapters.feed_forward import MoE


def mixtral(config: PreTrainedConfig) -> Architecture:
    return mixture_like(config, MoE("mlp", router="gate"), config.num_local_experts, config.intermediate_size)
