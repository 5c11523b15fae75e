"""GPT-NeoX (Pythia)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.attention import Attention
from adapters.config import rotary_values
from adapters.families.shapes.gpt2 import WIDE_AND_BACK, fused, gpt2_like
from adapters.imports.versions import unembedding_of_gpt_neox


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
