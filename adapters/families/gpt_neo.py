"""GPT-Neo."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register


@register("GPTNeoPreTrainedModel")
def gpt_neo(config: PreTrainedConfig) -> Architecture:
    q, k, v = (Projection(f"{letter}_proj") for letter in "qkv")
    # Its flash attention computes no softmax that could be watched.
    eager = config._attn_implementation == "eager"
    attn = Attention("attn.attention", q, k, v, o="out_proj", shows_scores=eager)
    mlp = MLP("mlp", up=Projection("c_fc"), down="c_proj")
    block = Block((Step(attn, pre=Norm("ln_1", LAYER_NORM)), Step(mlp, pre=Norm("ln_2", LAYER_NORM))))
    return Architecture(
        embed="wte",
        pos_embed="wpe",
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM), output_key=0, output_length=2),),
        unembed="lm_head",
        config_values={
            "use_attn_scale": False,
            "use_local_attn": "local" in config.attention_layers,
            "window_size": config.window_size,
            "attn_types": list(config.attention_layers),
        },
    )
