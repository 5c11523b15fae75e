"""GPT-2."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step, tables
from adapters.attention import Attention, Projection
from adapters.families.shapes.gpt2 import (
    FEED_FORWARD,
    WIDE_AND_BACK,
    K,
    Q,
    V,
    fused,
    gpt2_like,
    in_a_row,
)
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, Norm
from adapters.registry import UnsupportedModelError, only
from adapters.views import AlibiScores, Composed, FilledScores, HeadsOfBatch, MaskedScores


def gpt2(config: PreTrainedConfig) -> Architecture:
    width = config.hidden_size
    heads = config.num_attention_heads
    q, k, v = in_a_row("c_attn", width // heads, heads, heads)
    return gpt2_like(
        Attention("attn", q, k, v, o="c_proj"),
        pos_embed="wpe",
        config_values={
            "d_mlp": config.n_inner or 4 * width,
            "use_attn_scale": config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        },
    )


# --------------------------------------------------------------------------------------------------
# GPT BigCode (StarCoder): GPT-2 with one head of keys and values.
# --------------------------------------------------------------------------------------------------


def gpt_bigcode(config: PreTrainedConfig) -> Architecture:
    only(config, add_cross_attention=False)
    q, k, v = fused("c_attn", config, config.multi_query)
    return gpt2_like(
        Attention("attn", q, k, v, o="c_proj"),
        pos_embed="wpe",
        config_values={
            "n_key_value_heads": 1 if config.multi_query else None,
            "use_attn_scale": config.scale_attn_weights,
            **({} if config.scale_attn_weights else {"attn_scale": 1.0}),
        },
    )


# --------------------------------------------------------------------------------------------------
# GPT-Neo.
# --------------------------------------------------------------------------------------------------


def gpt_neo(config: PreTrainedConfig) -> Architecture:
    # Its flash attention computes no softmax that could be watched.
    scores = MaskedScores() if config._attn_implementation == "eager" else None
    return gpt2_like(
        Attention("attn.attention", Q, K, V, o="out_proj", scores=scores),
        output=(0, 2),
        pos_embed="wpe",
        config_values={
            "use_attn_scale": False,
            "use_local_attn": "local" in config.attention_layers,
            "window_size": config.window_size,
            "attn_types": list(config.attention_layers),
        },
    )


# --------------------------------------------------------------------------------------------------
# MPT: GPT-2 with ALiBi, and without biases.
# --------------------------------------------------------------------------------------------------


def mpt(config: PreTrainedConfig) -> Architecture:
    # Queries, keys and values would differ from the output of their projection.
    only(config.attn_config, clip_qkv=(None, 0))
    width = config.hidden_size
    heads = config.n_heads
    scale = config.attn_config.softmax_scale
    q, k, v = in_a_row("Wqkv", width // heads, heads, heads)
    return gpt2_like(
        Attention("attn", q, k, v, o="out_proj"),
        MLP("ffn", up=Projection("up_proj"), down="down_proj"),
        out=("resid_attn_dropout", "ffn.down_proj"),
        pre=("norm_1", "norm_2"),
        path="blocks",
        output=(0, 2),
        final_norm="norm_f",
        config_values={
            "positional_embedding_type": "alibi",
            "d_mlp": 4 * width,
            "act_fn": "gelu",
            **({"attn_scale": 1 / scale} if scale else {}),
        },
    )


# --------------------------------------------------------------------------------------------------
# BLOOM.
# --------------------------------------------------------------------------------------------------


def bloom(config: PreTrainedConfig) -> Architecture:
    if config.apply_residual_connection_post_layernorm:
        raise UnsupportedModelError(
            "BLOOM with apply_residual_connection_post_layernorm=True adds the norm's output to"
            " what follows: it has no residual stream for hook points to show"
        )
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise UnsupportedModelError(
            "BLOOM with slow_but_exact=True and pretraining_tp > 1 does not call its output"
            " projections, on which hook points stand; load it with slow_but_exact=False"
        )
    q, k, v = fused("query_key_value", config)
    # Attention and MLP add the residual stream to their result themselves: the points come before
    # that.
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


# --------------------------------------------------------------------------------------------------
# OPT.
# --------------------------------------------------------------------------------------------------


def opt(config: PreTrainedConfig) -> Architecture:
    if not config.do_layer_norm_before:
        raise UnsupportedModelError(
            "OPT with do_layer_norm_before=False (opt-350m) norms the residual stream itself, after"
            " attention and MLP: there is no adapter for it"
        )
    if config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedModelError(
            f"OPT with word_embed_proj_dim={config.word_embed_proj_dim} and"
            f" hidden_size={config.hidden_size} projects its embeddings into and out of the"
            " residual stream: there is no adapter for it"
        )
    return gpt2_like(
        Attention("self_attn", Q, K, V, o="out_proj"),
        MLP("", up=Projection("fc1"), down="fc2", flat=True),
        out=(None, "fc2"),
        pre=("self_attn_layer_norm", "final_layer_norm"),
        path="decoder.layers",
        final_norm=None if config._remove_final_layer_norm else "decoder.final_layer_norm",
        embed="decoder.embed_tokens",
        pos_embed="decoder.embed_positions",
    )


# --------------------------------------------------------------------------------------------------
# GPT (the first): norms stand on the stream itself.
# --------------------------------------------------------------------------------------------------


def openai_gpt(config: PreTrainedConfig) -> Architecture:
    width = config.hidden_size
    heads = config.num_attention_heads
    q, k, v = in_a_row("c_attn", width // heads, heads, heads)
    # It masks with -10000.
    attn = Attention("attn", q, k, v, o="c_proj", scores=FilledScores(-5000.0))
    first = Step(attn, stream_norm=Norm("ln_1", LAYER_NORM))
    second = Step(FEED_FORWARD, stream_norm=Norm("ln_2", LAYER_NORM))
    embedding = Embedding("tokens_embed", added=tables("positions_embed"))
    stack = Stack("h", Block((first, second)), embedding=embedding, output=(0, 1))
    act_fn = {"gelu": "gelu_new", "swish": "silu"}.get(config.afn, config.afn)
    values = {"d_mlp": 4 * width, "act_fn": act_fn}
    return Architecture((stack,), Readout("lm_head"), config_values=values)


# --------------------------------------------------------------------------------------------------
# XGLM and BioGPT: GPT-2 with separate projections, and layers directly in the block.
# --------------------------------------------------------------------------------------------------


def xglm(config: PreTrainedConfig) -> Architecture:
    only(config, add_cross_attention=False)
    return _declared("lm_head", heads=config.attention_heads, d_mlp=config.ffn_dim)


def biogpt(config: PreTrainedConfig) -> Architecture:
    return _declared("output_projection", heads=None, d_mlp=config.intermediate_size)


def _declared(unembed: str, *, heads: int | None, d_mlp: int) -> Architecture:
    scores = MaskedScores() if heads is None else Composed(HeadsOfBatch(heads), MaskedScores())
    return gpt2_like(
        Attention("self_attn", Q, K, V, o="out_proj", scores=scores),
        MLP("", up=Projection("fc1"), down="fc2"),
        out=(None, "fc2"),
        pre=("self_attn_layer_norm", "final_layer_norm"),
        path="layers",
        final_norm="layer_norm",
        embed="embed_tokens",
        pos_embed="embed_positions",
        unembed=unembed,
        config_values={"d_mlp": d_mlp},
    )
