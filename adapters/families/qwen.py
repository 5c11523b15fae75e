"""Qwen 2 and Qwen 3."""

from __future__ import annotations

from typing import Any

from adapters.architecture import Architecture
from adapters.families.llama import llama_like
from adapters.norms import RMS_NORM
from adapters.registry import register

# Their tokenizers have no beginning-of-sequence token.
_FACTS = {"default_prepend_bos": False}


@register("Qwen2PreTrainedModel")
def qwen2(config: Any) -> Architecture:
    return llama_like(config, facts=_FACTS)


@register("Qwen3PreTrainedModel")
def qwen3(config: Any) -> Architecture:
    return llama_like(config, attn={"q_norm": "q_norm", "k_norm": "k_norm"}, block={"qk_norm": RMS_NORM}, facts=_FACTS)
