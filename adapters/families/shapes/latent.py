"""Latent attention (DeepSeek V2): keys and values are made from one narrow vector of each position."""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.attention import Attention, Projection
from adapters.views import Composed, OneHead, View, gathered, interleaved


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
    k, v = (Projection("kv_b_proj", Composed(OneHead(), view), latent="kv_a_layernorm") for view in views)
    low = config.q_lora_rank is not None
    return Attention(
        "self_attn",
        Projection("q_b_proj" if low else "q_proj", width=plain + turned, latent="q_a_layernorm" if low else None),
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
