"""Flint."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.qwen_moe import sparse_steps
from adapters.families.shapes.llama import FEED_FORWARD, NORMED_ATTENTION
from adapters.families.shapes.mixture import SIGMOID
from adapters.views import MaskedScores, SinkScores


def flint(config: PreTrainedConfig) -> Architecture:
    """Qwen 3 with attention sinks, and a shared expert without a gate."""
    moe = replace(SIGMOID, shared=replace(FEED_FORWARD, path="shared_expert", flat=True))
    attn = replace(NORMED_ATTENTION, scores=SinkScores(MaskedScores(), "sinks"))
    return sparse_steps(config, attn, moe, config.shared_expert_intermediate_size, {})
