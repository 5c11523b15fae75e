"""GPT BigCode (StarCoder): GPT-2 with one head of keys and values."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.families.shapes.gpt2 import fused, gpt2_like
from adapters.registry import only


def gpt_bigcode(config: PreTrainedConfig) -> Architecture:
    only(config, add_cross_attention=False)
    q, k, v = fused("c_attn", config, config.multi_query)
    return gpt2_like(
        Attention("attn", q, k, v, o="c_proj"),
        pos_embed="wpe",
        config_values={
            "n_key_value_heads": 1 if config.multi_query else None,
            "use_attn_scale": config.scale_attn_weights,
            **({} if config.scale_attn_weights else {"attn_scale": 1.0}),
        },
    )
