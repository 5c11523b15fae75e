"""GPT-J."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.gpt2 import K, Q, V, gpt2_like
from adapters.feed_forward import MLP
from adapters.views import MaskedScores


def gptj_like(attn: Attention, rotary_dim: int) -> Architecture:
    """GPT-J with another attention.

    Args:
        attn: the attention.
        rotary_dim: how many of each head's columns are rotated.
    """
    return gpt2_like(
        attn,
        MLP("mlp", up=Projection("fc_in"), down="fc_out"),
        pre=("ln_1", "ln_1"),
        parallel=True,
        output=(0, 2),
        config_values={
            "positional_embedding_type": "rotary",
            "rotary_dim": rotary_dim,
            "rotary_base": 10000.0,  # a constant in its source
            "rotary_adjacent_pairs": True,
        },
    )


def gptj(config: PreTrainedConfig) -> Architecture:
    # Its flash attention does not go through the method in which the others compute the softmax.
    scores = MaskedScores() if config._attn_implementation == "eager" else None
    return gptj_like(Attention("attn", Q, K, V, o="out_proj", rotary="last", scores=scores), config.rotary_dim)
