"""GPT-J."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.registry import register


@register("GPTJPreTrainedModel")
def gptj(config: Any) -> Architecture:
    return Architecture(
        embed="wte",
        blocks="h",
        block=Block(
            ln1="ln_1",
            attn=Attention(
                "attn",
                Projection("q_proj"),
                Projection("k_proj"),
                Projection("v_proj"),
                o="out_proj",
                rotary=True,
                # Its flash attention does not go through the method in which the others compute the softmax.
                tap="core" if config._attn_implementation == "eager" else None,
            ),
            mlp=MLP("mlp", up=Projection("fc_in"), down="fc_out"),
            parallel=True,
            shared_norm=True,
            output_key=0,
            output_length=2,
        ),
        final_norm="ln_f",
        unembed="lm_head",
        facts={
            "positional_embedding_type": "rotary",
            "rotary_dim": config.rotary_dim,
            "rotary_base": 10000.0,  # a constant in its source
            "rotary_adjacent_pairs": True,
        },
    )
