"""MPT: GPT-2 with ALiBi, and without biases."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.gpt2 import gpt2_like
from adapters.feed_forward import MLP
from adapters.registry import only
from adapters.views import columns


def mpt(config: PreTrainedConfig) -> Architecture:
    only(config.attn_config, clip_qkv=(None, 0))  # queries, keys and values would not be what their projection makes
    width, heads, scale = config.hidden_size, config.n_heads, config.attn_config.softmax_scale
    q, k, v = (Projection("Wqkv", columns(i * width, (i + 1) * width, heads)) for i in range(3))
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
