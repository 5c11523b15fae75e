"""GPT-NeoX (Pythia)."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.config import rotary_facts
from adapters.registry import register
from adapters.views import interleaved


@register("GPTNeoXPreTrainedModel")
def gpt_neox(config: Any) -> Architecture:
    q, k, v = (Projection("query_key_value", interleaved(config.num_attention_heads, i)) for i in range(3))
    return Architecture(
        embed="embed_in",
        blocks="layers",
        block=Block(
            ln1="input_layernorm",
            attn=Attention("attention", q, k, v, o="dense", out="post_attention_dropout", out_key=None, rotary=True),
            ln2="post_attention_layernorm",
            mlp=MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h", out="post_mlp_dropout"),
            parallel=config.use_parallel_residual,
        ),
        final_norm="final_layer_norm",
        unembed="lm_head",
        facts=rotary_facts(config),
    )
