"""Mixtral."""

from __future__ import annotations

from typing import Any

from adapters.architecture import Architecture, MoE
from adapters.families.llama import llama_like
from adapters.registry import register


@register("MixtralPreTrainedModel")
def mixtral(config: Any) -> Architecture:
    facts = {
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "d_expert": config.intermediate_size,
        "gated_mlp": True,
    }
    return llama_like(config, block={"mlp": MoE("mlp", router="gate")}, facts=facts)
