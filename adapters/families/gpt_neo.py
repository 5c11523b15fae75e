"""GPT-Neo."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.registry import register


@register("GPTNeoPreTrainedModel")
def gpt_neo(config: Any) -> Architecture:
    return Architecture(
        embed="wte",
        pos_embed="wpe",
        blocks="h",
        block=Block(
            ln1="ln_1",
            attn=Attention(
                "attn.attention",
                Projection("q_proj"),
                Projection("k_proj"),
                Projection("v_proj"),
                o="out_proj",
                # Its flash attention computes no softmax that could be watched.
                tap="forward" if config._attn_implementation == "eager" else None,
            ),
            ln2="ln_2",
            mlp=MLP("mlp", up=Projection("c_fc"), down="c_proj"),
            output_key=0,
            output_length=2,
        ),
        final_norm="ln_f",
        unembed="lm_head",
        facts={
            "use_attn_scale": False,
            "use_local_attn": "local" in config.attention_layers,
            "window_size": config.window_size,
            "attn_types": list(config.attention_layers),
        },
    )
