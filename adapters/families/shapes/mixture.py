"""Llama with mixtures of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Unpack

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import FEED_FORWARD, Differences, llama_like
from adapters.feed_forward import MLP, MoE
from adapters.registry import UndeclaredOptionError

#: The expert that every token is sent to, as DeepSeek has it.
SHARED = MLP("shared_experts", FEED_FORWARD.up, FEED_FORWARD.down, FEED_FORWARD.gate)
#: Experts are chosen by a sigmoid of their logits and a term of their own, as in DeepSeek V3.
SIGMOID = MoE("mlp", router="gate", chosen_by="scores", shared=SHARED)
#: The same with a shared expert that works on rows ``(batch pos)``.
FLAT_SIGMOID = replace(SIGMOID, shared=replace(SHARED, flat=True))


def mixture_like(
    config: PreTrainedConfig,
    moe: MoE,
    n_experts: int,
    d_expert: int,
    d_shared_expert: int | None = None,
    *,
    per_token: int | None = None,
    dense: Collection[int] = (),
    config_values: Mapping[str, object] | None = None,
    **differences: Unpack[Differences],
) -> Architecture:
    """Llama with mixtures of experts.

    Args:
        config: the Hugging Face configuration.
        moe: the mixture.
        n_experts, d_expert, d_shared_expert: how many experts there are, and how wide they are.
        per_token: how many of them a token is sent to; None: what the configuration says.
        dense: the layers, by index, that have an MLP.
        config_values, differences: as for `llama_like`.

    Raises:
        UndeclaredOptionError: the shared expert has no width.
    """
    if d_shared_expert == 0:
        raise UndeclaredOptionError("a mixture with a shared expert of no width is not declared")
    if len(dense) == config.num_hidden_layers:
        return llama_like(config, config_values=config_values, **differences)
    values = {
        "num_experts": n_experts,
        "experts_per_token": config.num_experts_per_tok if per_token is None else per_token,
        "d_expert": d_expert,
        "d_shared_expert": d_shared_expert,
        "d_mlp": config.intermediate_size if dense else d_expert,
        "gated_mlp": True,
    }
    layers = dict.fromkeys(dense, FEED_FORWARD)
    return llama_like(config, mlp=moe, layers=layers, config_values={**values, **(config_values or {})}, **differences)


def dense_first(config: PreTrainedConfig) -> range:
    """The layers that have an MLP, where the configuration says how many do: the first ones."""
    return range(min(config.first_k_dense_replace, config.num_hidden_layers))


def dense_listed(config: PreTrainedConfig) -> list[int]:
    """The layers that have an MLP, where the configuration says of each what it has."""
    return [index for index, kind in enumerate(config.mlp_layer_types) if kind != "sparse"]
