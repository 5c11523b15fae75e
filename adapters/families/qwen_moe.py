"""Qwen's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adapters.architecture import MLP, Architecture, MoE
from adapters.families.qwen import qwen2, qwen3
from adapters.registry import register


@register("Qwen2MoePreTrainedModel")
def qwen2_moe(config: Any) -> Architecture:
    """Qwen 2, with one expert more that every token is sent to."""
    width = config.shared_expert_intermediate_size
    return _mixed(config, qwen2(config), "shared_expert", shared_gate="shared_expert_gate", d_shared_expert=width)


@register("Qwen3MoePreTrainedModel")
def qwen3_moe(config: Any) -> Architecture:
    return _mixed(config, qwen3(config))


def _mixed(
    config: Any,
    dense: Architecture,
    shared: str = "",
    shared_gate: str | None = None,
    d_shared_expert: int | None = None,
) -> Architecture:
    """A mixture in each layer, but for those that the configuration excepts."""
    n = config.num_hidden_layers
    step, excepted = config.decoder_sparse_step, config.mlp_only_layers
    mixtures = [i for i in range(n) if config.num_experts > 0 and i not in excepted and (i + 1) % step == 0]
    if not mixtures:
        return dense
    mlp = dense.block.mlp
    assert isinstance(mlp, MLP)
    own = replace(mlp, path=shared, flat=True) if shared else None
    moe = MoE("mlp", router="gate", shared=own, shared_gate=shared_gate)
    facts = {
        "num_experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "d_expert": config.moe_intermediate_size,
        "d_shared_expert": d_shared_expert,
        "d_mlp": config.moe_intermediate_size if len(mixtures) == n else config.intermediate_size,
        "gated_mlp": True,
    }
    return replace(
        dense,
        block=replace(dense.block, mlp=moe),
        layers={i: dense.block for i in range(n) if i not in mixtures},
        facts={**dense.facts, **facts},
    )
