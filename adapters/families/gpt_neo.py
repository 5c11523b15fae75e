"""GPT-Neo."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.families.shapes.gpt2 import K, Q, V, gpt2_like
from adapters.views import MaskedScores


def gpt_neo(config: PreTrainedConfig) -> Architecture:
    # Its flash attention computes no softmax that could be watched.
    eager = config._attn_implementation == "eager"
    return gpt2_like(
        Attention("attn.attention", Q, K, V, o="out_proj", scores=MaskedScores() if eager else None),
        output=(0, 2),
        pos_embed="wpe",
        config_values={
            "use_attn_scale": False,
            "use_local_attn": "local" in config.attention_layers,
            "window_size": config.window_size,
            "attn_types": list(config.attention_layers),
        },
    )
