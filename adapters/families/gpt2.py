"""GPT-2."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register
from adapters.views import columns


@register("GPT2PreTrainedModel")
def gpt2(config: PreTrainedConfig) -> Architecture:
    width, heads = config.hidden_size, config.num_attention_heads
    q, k, v = (Projection("c_attn", columns(i * width, (i + 1) * width, heads)) for i in range(3))
    attn = Attention("attn", q, k, v, o="c_proj")
    mlp = MLP("mlp", up=Projection("c_fc"), down="c_proj")
    block = Block((Step(attn, pre=Norm("ln_1", LAYER_NORM)), Step(mlp, pre=Norm("ln_2", LAYER_NORM))))
    return Architecture(
        embed="wte",
        pos_embed="wpe",
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM)),),
        unembed="lm_head",
        config_values={
            "d_mlp": config.n_inner or 4 * width,
            "use_attn_scale": config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        },
    )
