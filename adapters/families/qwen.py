"""Qwen 2 and Qwen 3."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import NORMED_ATTENTION, llama_like

# Their tokenizers have no beginning-of-sequence token.
VALUES = {"default_prepend_bos": False}


def qwen2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, config_values=VALUES)


def qwen3(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_ATTENTION, config_values=VALUES)
