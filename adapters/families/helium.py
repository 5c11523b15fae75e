"""Helium and ERNIE 4.5: Llama, with neighbouring dimensions of queries and keys rotated together."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import llama_like
from adapters.families.shapes.mixture import SHARED, mixture_like
from adapters.feed_forward import MoE


def helium(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, config_values={"rotary_adjacent_pairs": True})


def ernie4_5_moe(config: PreTrainedConfig) -> Architecture:
    n, n_shared, width = config.num_hidden_layers, config.moe_num_shared_experts, config.moe_intermediate_size
    mixed = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    dense = [i for i in range(n) if i not in mixed or (i + 1) % config.moe_layer_interval]
    moe = MoE(
        "mlp",
        router="gate",
        chosen_by="corrected probabilities",
        shared=replace(SHARED, flat=True) if n_shared else None,
    )
    return mixture_like(
        config,
        moe,
        config.moe_num_experts,
        width,
        width * n_shared or None,
        per_token=config.moe_k,
        dense=dense,
        config_values={"rotary_adjacent_pairs": True},
    )
