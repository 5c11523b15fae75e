"""GPT-J."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register


@register("GPTJPreTrainedModel")
def gptj(config: PreTrainedConfig) -> Architecture:
    q, k, v = (Projection(f"{letter}_proj") for letter in "qkv")
    # Its flash attention does not go through the method in which the others compute the softmax.
    eager = config._attn_implementation == "eager"
    attn = Attention("attn", q, k, v, o="out_proj", rotary=True, shows_scores=eager)
    mlp = MLP("mlp", up=Projection("fc_in"), down="fc_out")
    norm = Norm("ln_1", LAYER_NORM)
    block = Block((Step(attn, pre=norm), Step(mlp, pre=norm, parallel=True)))
    return Architecture(
        embed="wte",
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM), output_key=0, output_length=2),),
        unembed="lm_head",
        config_values={
            "positional_embedding_type": "rotary",
            "rotary_dim": config.rotary_dim,
            "rotary_base": 10000.0,  # a constant in its source
            "rotary_adjacent_pairs": True,
        },
    )
