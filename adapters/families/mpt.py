"""MPT: GPT-2 with ALiBi, and without biases."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import only, register
from adapters.views import columns


@register("MptPreTrainedModel")
def mpt(config: PreTrainedConfig) -> Architecture:
    only(config.attn_config, clip_qkv=(None, 0))  # queries, keys and values would not be what their projection makes
    width, heads, scale = config.hidden_size, config.n_heads, config.attn_config.softmax_scale
    q, k, v = (Projection("Wqkv", columns(i * width, (i + 1) * width, heads)) for i in range(3))
    attn = Attention("attn", q, k, v, o="out_proj", out="resid_attn_dropout", out_key=None)
    mlp = MLP("ffn", up=Projection("up_proj"), down="down_proj", out="ffn.down_proj")
    block = Block((Step(attn, pre=Norm("norm_1", LAYER_NORM)), Step(mlp, pre=Norm("norm_2", LAYER_NORM))))
    return Architecture(
        embed="wte",
        stacks=(Stack("blocks", block, final_norm=Norm("norm_f", LAYER_NORM), output_key=0, output_length=2),),
        unembed="lm_head",
        config_values={
            "positional_embedding_type": "alibi",
            "d_mlp": 4 * width,
            "act_fn": "gelu",
            **({"attn_scale": 1 / scale} if scale else {}),
        },
    )
