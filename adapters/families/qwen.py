"""Qwen 2 and Qwen 3."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.llama import ATTENTION, llama_like
from adapters.norms import RMS_NORM, Norm
from adapters.registry import register

#: Llama's attention, with norms of queries and keys.
NORMED_ATTENTION = replace(ATTENTION, q_norm=Norm("q_norm", RMS_NORM), k_norm=Norm("k_norm", RMS_NORM))
# Their tokenizers have no beginning-of-sequence token.
VALUES = {"default_prepend_bos": False}


@register("Qwen2PreTrainedModel")
def qwen2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, config_values=VALUES)


@register("Qwen3PreTrainedModel")
def qwen3(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_ATTENTION, config_values=VALUES)
