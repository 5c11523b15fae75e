"""GPT-2."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention, Projection
from adapters.families.shapes.gpt2 import gpt2_like
from adapters.views import columns


def gpt2(config: PreTrainedConfig) -> Architecture:
    width, heads = config.hidden_size, config.num_attention_heads
    q, k, v = (Projection("c_attn", columns(i * width, (i + 1) * width, heads)) for i in range(3))
    return gpt2_like(
        Attention("attn", q, k, v, o="c_proj"),
        pos_embed="wpe",
        config_values={
            "d_mlp": config.n_inner or 4 * width,
            "use_attn_scale": config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        },
    )
