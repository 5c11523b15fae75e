"""Falcon: queries, keys and values in one projection; attention and MLP side by side or one after the other."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.config import rotary_values
from adapters.families.shapes.gpt2 import WIDE_AND_BACK, fused, gpt2_like
from adapters.registry import only
from adapters.views import MaskedScores


def falcon(config: PreTrainedConfig) -> Architecture:
    only(config, new_decoder_architecture=False, alibi=False)  # keys and values repeated; scores that ALiBi is in
    q, k, v = fused("query_key_value", config, config.multi_query)
    shows = "flash" not in (config._attn_implementation or "")  # it has a class of its own for that
    parallel = config.parallel_attn
    return gpt2_like(
        Attention("self_attention", q, k, v, o="dense", rotary="last", scores=MaskedScores() if shows else None),
        WIDE_AND_BACK,
        pre=("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm"),
        parallel=parallel,
        output=(0, 2),
        embed="word_embeddings",
        # Side by side, what attention adds is written into what the MLP returned.
        changed_in_place=(("*.mlp", "output"),) if parallel else (),
        config_values={
            **rotary_values(config),
            "n_key_value_heads": 1 if config.multi_query else None,
            "d_mlp": config.ffn_hidden_size,
            "act_fn": config.activation,
        },
    )
