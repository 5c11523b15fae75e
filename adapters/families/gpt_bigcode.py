"""GPT BigCode (StarCoder): GPT-2 with one head of keys and values."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import only, register
from adapters.views import columns, interleaved


@register("GPTBigCodePreTrainedModel")
def gpt_bigcode(config: PreTrainedConfig) -> Architecture:
    only(config, add_cross_attention=False)
    width, heads = config.hidden_size, config.num_attention_heads
    d_head = width // heads
    if config.multi_query:
        places = ((0, width, heads), (width, width + d_head, 1), (width + d_head, width + 2 * d_head, 1))
        q, k, v = (Projection("c_attn", columns(*place)) for place in places)
    else:
        q, k, v = (Projection("c_attn", interleaved(heads, i)) for i in range(3))
    attn = Attention("attn", q, k, v, o="c_proj")
    mlp = MLP("mlp", up=Projection("c_fc"), down="c_proj")
    block = Block((Step(attn, pre=Norm("ln_1", LAYER_NORM)), Step(mlp, pre=Norm("ln_2", LAYER_NORM))))
    return Architecture(
        embed="wte",
        pos_embed="wpe",
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM)),),
        unembed="lm_head",
        config_values={
            "n_key_value_heads": 1 if config.multi_query else None,
            "use_attn_scale": config.scale_attn_weights,
            **({} if config.scale_attn_weights else {"attn_scale": 1.0}),
        },
    )
