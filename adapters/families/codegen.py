"""CodeGen: GPT-J with queries, values and keys in one projection."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register
from adapters.views import gathered

_GROUPS = 4  # of heads, each with its own queries, values and keys: a constant in its source


@register("CodeGenPreTrainedModel")
def codegen(config: PreTrainedConfig) -> Architecture:
    heads, d_head = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    each = heads // _GROUPS

    def part(place: int) -> Projection:
        starts = [((head // each * 3 + place) * each + head % each) * d_head for head in range(heads)]
        return Projection("qkv_proj", gathered(tuple(tuple(range(start, start + d_head)) for start in starts)))

    attn = Attention("attn", q=part(0), k=part(2), v=part(1), o="out_proj", rotary=True)
    mlp = MLP("mlp", up=Projection("fc_in"), down="fc_out")
    norm = Norm("ln_1", LAYER_NORM)
    block = Block((Step(attn, pre=norm), Step(mlp, pre=norm, parallel=True)))
    return Architecture(
        embed="wte",
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM), output_key=0, output_length=2),),
        unembed="lm_head",
        config_values={
            "positional_embedding_type": "rotary",
            "rotary_dim": config.rotary_dim or d_head,
            "rotary_base": 10000.0,  # another constant
            "rotary_adjacent_pairs": True,
        },
    )
