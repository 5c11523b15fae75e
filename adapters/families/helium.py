"""Helium and ERNIE 4.5: Llama, with neighbouring dimensions of queries and keys rotated together."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.llama import llama_like
from adapters.registry import register


@register("HeliumPreTrainedModel", "Ernie4_5PreTrainedModel")
def helium(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, config_values={"rotary_adjacent_pairs": True})
