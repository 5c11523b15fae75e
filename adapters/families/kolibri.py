"""Kolibri, Laguna and AFMoE: mixtures with a norm or a gate more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mode

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block
from adapters.attention import Attention, Gate, Projection
from adapters.families.shapes.llama import HEADS_FIRST, NORMED_ATTENTION
from adapters.families.shapes.mixture import FLAT_SIGMOID, SIGMOID, dense_listed, mixture_like
from adapters.registry import only


def kolibri1(config: PreTrainedConfig) -> Architecture:
    width = config.moe_intermediate_size
    return mixture_like(
        config,
        SIGMOID,
        config.num_experts,
        width,
        config.shared_expert_intermediate_size,
        attn=HEADS_FIRST,
        post=("post_self_attn_layernorm", "post_mlp_layernorm"),
    )


def laguna(config: PreTrainedConfig) -> Architecture:
    """A gate of each head's `z`; layers may differ in their heads, and in how much of these is rotated."""
    only(config, moe_router_logit_softcapping=0.0)
    attn = replace(NORMED_ATTENTION, z_transform=Gate(Projection("g_proj"), "softplus"))
    width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    moe = replace(FLAT_SIGMOID, factor=config.moe_routed_scaling_factor)
    heads = config.num_attention_heads_per_layer[: config.num_hidden_layers]
    usual = mode(heads)
    made = mixture_like(
        config,
        moe,
        config.num_experts,
        width,
        shared,
        dense=dense_listed(config),
        attn=attn,
        config_values={"n_heads": usual},
    )
    own: dict[int, dict[str, object]] = {i: {"n_heads": n} for i, n in enumerate(heads) if n != usual}
    for index, kind in enumerate(config.layer_types):
        if kind == "sliding_attention":
            share = config.rope_parameters[kind].get("partial_rotary_factor", 1.0)
            own.setdefault(index, {})["rotary_dim"] = int(config.head_dim * share)
    layers = {index: _with(made.stack.block_at(index), values) for index, values in own.items()}
    return replace(made, stacks=(replace(made.stack, layers={**made.stack.layers, **layers}),))


def _with(block: Block, values: Mapping[str, object]) -> Block:
    """A block whose attention has facts of its own."""
    first, *others = block.steps
    assert isinstance(first.part, Attention)
    part = replace(first.part, config_values={**first.part.config_values, **values})
    return replace(block, steps=(replace(first, part=part), *others))


def afmoe(config: PreTrainedConfig) -> Architecture:
    """A gate of each column of `z`, norms on both sides."""
    attn = replace(NORMED_ATTENTION, z_transform=Gate(Projection("gate_proj"), "sigmoid"))
    width = config.moe_intermediate_size
    return mixture_like(
        config,
        replace(FLAT_SIGMOID, router="router"),
        config.num_experts,
        width,
        width * config.num_shared_experts,
        dense=range(min(config.num_dense_layers, config.num_hidden_layers)),
        attn=attn,
        pre=("input_layernorm", "pre_mlp_layernorm"),
        post=("post_attention_layernorm", "post_mlp_layernorm"),
        embed_factor=config.hidden_size**0.5 if config.mup_enabled else 1.0,
    )
