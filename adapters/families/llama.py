"""Llama and the families that have its shape."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Projection
from adapters.families.shapes.llama import ATTENTION, FEED_FORWARD, llama_like
from adapters.feed_forward import MLP

__all__ = ["ATTENTION", "FEED_FORWARD", "UNGATED", "arcee", "llama", "llama_like"]
#: Llama's MLP without a gate.
UNGATED = MLP("mlp", up=Projection("up_proj"), down="down_proj")
_SAME_SHAPE = ("Cwm", "Llama", "Ministral", "Ministral3", "Mistral", "SeedOss", "SmolLM3")


def llama(config: PreTrainedConfig) -> Architecture:
    return llama_like(config)


def arcee(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, mlp=UNGATED)
