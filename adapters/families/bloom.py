"""BLOOM."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import UnsupportedModelError, register
from adapters.views import AlibiScores, interleaved


@register("BloomPreTrainedModel")
def bloom(config: PreTrainedConfig) -> Architecture:
    if config.apply_residual_connection_post_layernorm:
        raise UnsupportedModelError(
            "BLOOM with apply_residual_connection_post_layernorm=True adds the norm's output to what follows: "
            "it has no residual stream for the hook points to stand on"
        )
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise UnsupportedModelError(
            "BLOOM with slow_but_exact=True and pretraining_tp > 1 does not call its output projections, on which hook "
            "points stand; load it with slow_but_exact=False"
        )
    q, k, v = (Projection("query_key_value", interleaved(config.num_attention_heads, i)) for i in range(3))
    # Attention and MLP add the residual stream to their result themselves: the points stand before that.
    out = "self_attention.dense"
    attn = Attention("self_attention", q, k, v, o="dense", out=out, out_key=None, scores=AlibiScores())
    mlp = MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h", out="mlp.dense_4h_to_h")
    block = Block(
        (
            Step(attn, pre=Norm("input_layernorm", LAYER_NORM)),
            Step(mlp, pre=Norm("post_attention_layernorm", LAYER_NORM)),
        )
    )
    return Architecture(
        embed="word_embeddings",
        embed_norm=Norm("word_embeddings_layernorm", LAYER_NORM),
        stacks=(Stack("h", block, final_norm=Norm("ln_f", LAYER_NORM), output_key=0, output_length=2),),
        unembed="lm_head",
        config_values={
            "d_mlp": 4 * config.hidden_size,
            "act_fn": "gelu_fast",
            "positional_embedding_type": "alibi",
            "default_prepend_bos": False,
        },
    )
