"""BLOOM."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.families.shapes.gpt2 import WIDE_AND_BACK, fused, gpt2_like
from adapters.registry import UnsupportedModelError
from adapters.views import AlibiScores


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
    q, k, v = fused("query_key_value", config)
    # Attention and MLP add the residual stream to their result themselves: the points come before that.
    out = ("self_attention.dense", "mlp.dense_4h_to_h")
    return gpt2_like(
        Attention("self_attention", q, k, v, o="dense", scores=AlibiScores()),
        WIDE_AND_BACK,
        out=out,
        pre=("input_layernorm", "post_attention_layernorm"),
        output=(0, 2),
        embed="word_embeddings",
        embed_norm="word_embeddings_layernorm",
        config_values={
            "d_mlp": 4 * config.hidden_size,
            "act_fn": "gelu_fast",
            "positional_embedding_type": "alibi",
            "default_prepend_bos": False,
        },
    )
