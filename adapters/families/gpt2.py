"""GPT-2."""

from __future__ import annotations

from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.registry import register
from adapters.views import columns


@register("GPT2PreTrainedModel")
def gpt2(config: Any) -> Architecture:
    width, heads = config.hidden_size, config.num_attention_heads
    q, k, v = (Projection("c_attn", columns(i * width, (i + 1) * width, heads)) for i in range(3))
    # The half-precision path that GPT-2 keeps for itself is chosen by name, inside its forward.
    own_softmax = config.reorder_and_upcast_attn and config._attn_implementation == "eager"
    return Architecture(
        embed="wte",
        pos_embed="wpe",
        blocks="h",
        block=Block(
            ln1="ln_1",
            attn=Attention("attn", q, k, v, o="c_proj", tap="forward" if own_softmax else "interface"),
            ln2="ln_2",
            mlp=MLP("mlp", up=Projection("c_fc"), down="c_proj"),
        ),
        final_norm="ln_f",
        unembed="lm_head",
        facts={
            "d_mlp": config.n_inner or 4 * width,
            "use_attn_scale": config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        },
    )
