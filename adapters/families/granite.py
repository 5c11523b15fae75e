"""Granite: Llama that multiplies what attention and MLP add, the embedding, the scores and the logits."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import SinkGate
from adapters.families.shapes.llama import ATTENTION, Factors, llama_like
from adapters.families.shapes.mixture import mixture_like
from adapters.feed_forward import MoE
from adapters.registry import only

#: What multiplies each head's `z`: the sigmoid of what its scores add up to, less a number of its own.
SINKS = replace(ATTENTION, z_transform=SinkGate("sinks"))


def _factors(config: PreTrainedConfig) -> Factors:
    return {
        "factor": config.residual_multiplier,
        "embed_factor": config.embedding_multiplier,
        "logit_factor": 1 / config.logits_scaling,
    }


def _scale(config: PreTrainedConfig) -> dict[str, object]:
    return {"attn_scale": 1 / config.attention_multiplier}


def granite(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, **_factors(config), config_values=_scale(config))


def hyperclovax(config: PreTrainedConfig) -> Architecture:
    post = ("post_norm1", "post_norm2") if config.use_post_norm else (None, None)
    factors: Factors = {**_factors(config), "logit_factor": config.logits_scaling}  # where Granite divides
    return llama_like(config, post=post, **factors, config_values=_scale(config))


def granite_moe(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "shared_intermediate_size"):
        only(config, shared_intermediate_size=0)
    moe = MoE("block_sparse_moe", router="router", chosen_by="logits")
    attn = SINKS if type(config).__name__ == "GraniteMoeSWAConfig" else ATTENTION
    n, width = config.num_local_experts, config.intermediate_size
    return mixture_like(config, moe, n, width, attn=attn, **_factors(config), config_values=_scale(config))


def granite_swa(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=SINKS, **_factors(config), config_values=_scale(config))
