"""Qwen's mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.families.qwen import VALUES
from adapters.families.shapes.llama import ATTENTION, FEED_FORWARD, NORMED_ATTENTION, llama_like
from adapters.feed_forward import MoE
from adapters.registry import register


@register("Qwen2MoePreTrainedModel")
def qwen2_moe(config: PreTrainedConfig) -> Architecture:
    shared = replace(FEED_FORWARD, path="shared_expert", flat=True)
    moe = MoE("mlp", router="gate", shared=shared, shared_gate="shared_expert_gate")
    return sparse_steps(config, ATTENTION, moe, config.shared_expert_intermediate_size)


@register("Qwen3MoePreTrainedModel")
def qwen3_moe(config: PreTrainedConfig) -> Architecture:
    return sparse_steps(config, NORMED_ATTENTION, MoE("mlp", router="gate"))


@register("Qwen3VLMoeTextModel")
def qwen3_vl_moe(config: PreTrainedConfig) -> Architecture:
    values = VALUES | {"use_local_attn": False, "window_size": None, "attn_types": None}  # its configuration has one
    return sparse_steps(config, NORMED_ATTENTION, MoE("mlp", router="gate"), None, values)


def sparse_steps(
    config: PreTrainedConfig,
    attn: Attention,
    moe: MoE,
    d_shared_expert: int | None = None,
    said: Mapping[str, object] = VALUES,
) -> Architecture:
    """A mixture in each layer, but for those that the configuration excepts."""
    n, step, excepted = config.num_hidden_layers, config.decoder_sparse_step, config.mlp_only_layers
    mixtures = [i for i in range(n) if config.num_experts > 0 and i not in excepted and (i + 1) % step == 0]
    if not mixtures:
        return llama_like(config, attn=attn, config_values=said)
    values = {
        **said,
        "num_experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "d_expert": config.moe_intermediate_size,
        "d_shared_expert": d_shared_expert,
        "d_mlp": config.moe_intermediate_size if len(mixtures) == n else config.intermediate_size,
        "gated_mlp": True,
    }
    dense = {i: FEED_FORWARD for i in range(n) if i not in mixtures}
    return llama_like(config, attn=attn, mlp=moe, layers=dense, config_values=values)
