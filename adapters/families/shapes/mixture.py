"""Llama with mixtures of experts in place of MLPs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Unpack

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.llama import FEED_FORWARD, Differences, llama_like
from adapters.feed_forward import MLP, MoE
from adapters.norms import RMS_NORM, Norm
from adapters.registry import UndeclaredOptionError
from adapters.views import Composed, OneHead, View, gathered, interleaved

#: The expert that every token is sent to, as in DeepSeek.
SHARED = MLP("shared_experts", FEED_FORWARD.up, FEED_FORWARD.down, FEED_FORWARD.gate)
#: Experts are chosen by a sigmoid of their logits and a term of their own, as in DeepSeek V3.
SIGMOID = MoE("mlp", router="gate", chosen_by="scores", shared=SHARED)
#: The same with a shared expert that works on rows ``(batch pos)``.
FLAT_SIGMOID = replace(SIGMOID, shared=replace(SHARED, flat=True))


def mixture_like(
    config: PreTrainedConfig,
    moe: MoE,
    *,
    n_experts: str = "num_experts",
    width: str = "moe_intermediate_size",
    n_shared: str = "num_shared_experts",
    d_shared_expert: int | None = None,
    per_token: int | None = None,
    dense: Collection[int] = (),
    config_values: Mapping[str, object] | None = None,
    **differences: Unpack[Differences],
) -> Architecture:
    """Declare Llama with mixtures of experts.

    Args:
        config: the Hugging Face configuration.
        moe: the mixture.
        n_experts, width, n_shared: the fields of the configuration for the number of experts, their
            width, and the shared expert's width as a multiple of theirs.
        d_shared_expert: the shared expert's width, where another field has it.
        per_token: the number of experts that a token is sent to; None: the configuration's.
        dense: the layers, by index, that have an MLP.
        config_values, differences: as for `llama_like`.

    Raises:
        UndeclaredOptionError: the shared expert has no width.
    """
    d_expert = getattr(config, width)
    if moe.shared and d_shared_expert is None:
        d_shared_expert = d_expert * getattr(config, n_shared)
    if d_shared_expert == 0:
        raise UndeclaredOptionError("a mixture with a shared expert of no width is not declared")
    if len(dense) == config.num_hidden_layers:
        return llama_like(config, config_values=config_values, **differences)
    if per_token is None:
        per_token = config.num_experts_per_tok
    values = {
        "num_experts": getattr(config, n_experts),
        "experts_per_token": per_token,
        "d_expert": d_expert,
        "d_shared_expert": d_shared_expert,
        "d_mlp": config.intermediate_size if dense else d_expert,
        "gated_mlp": True,
    }
    layers = dict.fromkeys(dense, FEED_FORWARD)
    return llama_like(
        config,
        mlp=moe,
        layers=layers,
        config_values={**values, **(config_values or {})},
        **differences,
    )


def dense_first(config: PreTrainedConfig) -> range:
    """Return the layers that have an MLP, where the configuration gives their number: the first
    ones.
    """
    return range(min(config.first_k_dense_replace, config.num_hidden_layers))


def dense_listed(config: PreTrainedConfig) -> list[int]:
    """Return the layers that have an MLP, where the configuration lists each layer's kind."""
    return [index for index, kind in enumerate(config.mlp_layer_types) if kind != "sparse"]


# --------------------------------------------------------------------------------------------------
# Latent attention (DeepSeek V2): keys and values are made from one narrow vector of each position.
# --------------------------------------------------------------------------------------------------


def latent_attention(config: PreTrainedConfig) -> Attention:
    """Declare the attention of a configuration that gives the widths of latents, and of the parts
    of queries and keys.
    """
    heads = config.num_attention_heads
    plain = config.qk_nope_head_dim
    turned = config.qk_rope_head_dim
    d_v = config.v_head_dim
    # Each head's keys, without the columns that are rotated, and then its values.
    views: list[View]
    if plain == d_v:
        views = [interleaved(heads, i, 2) for i in range(2)]
    else:
        starts = [head * (plain + d_v) for head in range(heads)]
        views = [
            gathered(tuple(tuple(range(start + first, start + last)) for start in starts))
            for first, last in ((0, plain), (plain, plain + d_v))
        ]
    latent = Norm("kv_a_layernorm", RMS_NORM)
    k, v = (Projection("kv_b_proj", Composed(OneHead(), view), latent=latent) for view in views)
    q = Projection("q_proj", width=plain + turned)
    if config.q_lora_rank is not None:
        q = replace(q, path="q_b_proj", latent=Norm("q_a_layernorm", RMS_NORM))
    if plain != d_v:
        k = replace(k, width=plain)
    return Attention("self_attn", q, k, v, o="o_proj", rotary="last")


def latent_values(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields of `ModelConfig` that such a configuration has under other names."""
    scale = math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    rope = config.rope_parameters
    if (
        rope.get("rope_type", "default") != "default"
        and rope.get("mscale_all_dim")
        and rope["factor"] > 1
    ):
        scale /= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2  # as in YaRN
    return {
        "d_head": config.v_head_dim,
        "n_key_value_heads": None,
        "attn_scale": scale,
        "rotary_dim": config.qk_rope_head_dim,
    }
