"""Apertus: Llama without gates, with an activation function that is learned."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.llama import UNGATED
from adapters.families.shapes.llama import HEADS_FIRST, llama_like


def apertus(config: PreTrainedConfig) -> Architecture:
    learned = config.hidden_act == "xielu"
    return llama_like(
        config,
        attn=HEADS_FIRST,
        mlp=replace(UNGATED, activation="act_fn") if learned else UNGATED,
        pre=("attention_layernorm", "feedforward_layernorm"),
        config_values={"act_fn": None} if learned else {},
    )
