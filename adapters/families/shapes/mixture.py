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

#: The expert that every token is sent to, as DeepSeek has it.
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
    """Llama with mixtures of experts.

    Args:
        config: the Hugging Face configuration.
        moe: the mixture.
        n_experts, width, n_shared: the fields of the configuration that say how many experts there are, how wide each
            is, and how many of them the shared one is as wide as.
        d_shared_expert: how wide that is, where it is said otherwise.
        per_token: how many of them a token is sent to; None: what the configuration says.
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
    values = {
        "num_experts": getattr(config, n_experts),
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


# ----------------------------------------------------------------------------------------------------------------------
# Latent attention (DeepSeek V2): keys and values are made from one narrow vector of each position.
# ----------------------------------------------------------------------------------------------------------------------


def latent_attention(config: PreTrainedConfig) -> Attention:
    """The attention of a configuration that says how wide latents, and the parts of queries and keys, are."""
    heads, plain, turned, d_v = (
        config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
    )  # fmt: skip
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
    k, v = (
        Projection("kv_b_proj", Composed(OneHead(), view), latent=Norm("kv_a_layernorm", RMS_NORM)) for view in views
    )
    return Attention(
        "self_attn",
        Projection("q_b_proj", width=plain + turned, latent=Norm("q_a_layernorm", RMS_NORM))
        if config.q_lora_rank is not None
        else Projection("q_proj", width=plain + turned),
        replace(k, width=None if plain == d_v else plain),
        v,
        o="o_proj",
        rotary="last",
    )


def latent_values(config: PreTrainedConfig) -> dict[str, object]:
    """The facts of `ModelConfig` that such a configuration says in words of its own."""
    scale = math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim") and rope["factor"] > 1:
        scale /= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2  # as in YaRN
    return {
        "d_head": config.v_head_dim,
        "n_key_value_heads": None,
        "attn_scale": scale,
        "rotary_dim": config.qk_rope_head_dim,
    }
