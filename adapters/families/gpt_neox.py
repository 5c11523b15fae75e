"""GPT-NeoX (Pythia)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.config import rotary_values
from adapters.families.shapes.gpt2 import WIDE_AND_BACK, K, Q, V, fused, gpt2_like
from adapters.families.shapes.llama import normed
from adapters.feed_forward import MLP
from adapters.imports import gptj_is_like_others, unembedding_of_gpt_neox
from adapters.norms import LAYER_NORM
from adapters.registry import only
from adapters.views import MaskedScores, gathered


def gpt_neox(config: PreTrainedConfig) -> Architecture:
    q, k, v = fused("query_key_value", config)
    return gpt2_like(
        Attention("attention", q, k, v, o="dense", rotary="last"),
        WIDE_AND_BACK,
        out=("post_attention_dropout", "post_mlp_dropout"),
        pre=("input_layernorm", "post_attention_layernorm"),
        parallel=config.use_parallel_residual,
        path="layers",
        final_norm="final_layer_norm",
        embed="embed_in",
        unembed=unembedding_of_gpt_neox(),
        config_values=rotary_values(config),
    )


# --------------------------------------------------------------------------------------------------
# GPT-J.
# --------------------------------------------------------------------------------------------------


def gptj_like(attn: Attention, rotary_dim: int) -> Architecture:
    """Declare GPT-J with another attention.

    Args:
        attn: the attention.
        rotary_dim: the number of each head's columns that are rotated.
    """
    return gpt2_like(
        attn,
        MLP("mlp", up=Projection("fc_in"), down="fc_out"),
        pre=("ln_1", "ln_1"),
        parallel=True,
        output=(None, 1) if gptj_is_like_others() else (0, 2),
        config_values={
            "positional_embedding_type": "rotary",
            "rotary_dim": rotary_dim,
            "rotary_base": 10000.0,  # a constant in its source
            "rotary_adjacent_pairs": True,
        },
    )


def gptj(config: PreTrainedConfig) -> Architecture:
    # A flash attention of its own bypasses the method in which the others compute the softmax.
    shows = gptj_is_like_others() or config._attn_implementation == "eager"
    scores = MaskedScores() if shows else None
    attn = Attention("attn", Q, K, V, o="out_proj", rotary="last", scores=scores)
    return gptj_like(attn, config.rotary_dim)


# --------------------------------------------------------------------------------------------------
# CodeGen: GPT-J with queries, values and keys in one projection.
# --------------------------------------------------------------------------------------------------


_GROUPS = 4  # of heads, each with its own queries, values and keys: a constant in its source


def codegen(config: PreTrainedConfig) -> Architecture:
    heads = config.num_attention_heads
    d_head = config.hidden_size // heads
    group_size = heads // _GROUPS

    def projection(place: int) -> Projection:
        columns = []
        for head in range(heads):
            group, index = divmod(head, group_size)
            start = ((group * 3 + place) * group_size + index) * d_head
            columns.append(tuple(range(start, start + d_head)))
        return Projection("qkv_proj", gathered(tuple(columns)))

    q, v, k = map(projection, range(3))
    attn = Attention("attn", q, k, v, o="out_proj", rotary="last")
    return gptj_like(attn, config.rotary_dim or d_head)


# --------------------------------------------------------------------------------------------------
# Falcon: queries, keys and values in one projection; attention and MLP side by side or one after
# the other.
# --------------------------------------------------------------------------------------------------


def falcon(config: PreTrainedConfig) -> Architecture:
    # Keys and values repeated; scores that include ALiBi.
    only(config, new_decoder_architecture=False, alibi=False)
    q, k, v = fused("query_key_value", config, config.multi_query)
    shows = "flash" not in (config._attn_implementation or "")  # it has a separate class for that
    scores = MaskedScores() if shows else None
    attn = Attention("self_attention", q, k, v, o="dense", rotary="last", scores=scores)
    parallel = config.parallel_attn
    return gpt2_like(
        attn,
        WIDE_AND_BACK,
        pre=("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm"),
        parallel=parallel,
        output=(0, 2),
        embed="word_embeddings",
        # In parallel, attention's result is added in place to the MLP's output.
        changed_in_place=(("*.mlp", "output"),) if parallel else (),
        config_values={
            **rotary_values(config),
            "n_key_value_heads": 1 if config.multi_query else None,
            "d_mlp": config.ffn_hidden_size,
            "act_fn": config.activation,
        },
    )


# --------------------------------------------------------------------------------------------------
# Phi (1, 1.5 and 2).
# --------------------------------------------------------------------------------------------------


def phi(config: PreTrainedConfig) -> Architecture:
    attn = Attention("self_attn", Q, K, V, o="dense", rotary="last", norms_over="heads first")
    if config.qk_layernorm:
        attn = normed(attn, "q_layernorm", "k_layernorm", LAYER_NORM)
    return gpt2_like(
        attn,
        MLP("mlp", up=Projection("fc1"), down="fc2"),
        pre=("input_layernorm", "input_layernorm"),
        parallel=True,
        path="layers",
        final_norm="final_layernorm",
        embed="embed_tokens",
        config_values=rotary_values(config),
    )
