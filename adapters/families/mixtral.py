"""Mixtral."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import llama_like
from adapters.feed_forward import MoE
from adapters.registry import register


@register("MixtralPreTrainedModel")
def mixtral(config: PreTrainedConfig) -> Architecture:
    values = {
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "d_expert": config.intermediate_size,
        "gated_mlp": True,
    }
    return llama_like(config, mlp=MoE("mlp", router="gate"), config_values=values)
