"""GPT-NeoX (Pythia)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import register
from adapters.views import interleaved


@register("GPTNeoXPreTrainedModel")
def gpt_neox(config: PreTrainedConfig) -> Architecture:
    q, k, v = (Projection("query_key_value", interleaved(config.num_attention_heads, i)) for i in range(3))
    attn = Attention("attention", q, k, v, o="dense", out="post_attention_dropout", out_key=None, rotary=True)
    mlp = MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h", out="post_mlp_dropout")
    block = Block(
        (
            Step(attn, pre=Norm("input_layernorm", LAYER_NORM)),
            Step(mlp, pre=Norm("post_attention_layernorm", LAYER_NORM), parallel=config.use_parallel_residual),
        )
    )
    return Architecture(
        embed="embed_in",
        stacks=(Stack("layers", block, final_norm=Norm("final_layer_norm", LAYER_NORM)),),
        unembed="lm_head",
        config_values=rotary_values(config),
    )
