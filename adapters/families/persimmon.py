"""Persimmon, and the text of Fuyu: queries, keys and values fused head by head."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, language_part
from adapters.attention import Attention, Projection
from adapters.families.shapes.llama import llama_like, normed
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM
from adapters.views import interleaved


def persimmon(config: PreTrainedConfig) -> Architecture:
    q, k, v = (Projection("query_key_value", interleaved(config.num_attention_heads, i)) for i in range(3))
    attn = Attention("self_attn", q, k, v, o="dense", rotary="last")
    if config.qk_layernorm:
        attn = normed(attn, "q_layernorm", "k_layernorm", LAYER_NORM)
    mlp = MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h")
    return llama_like(config, attn=attn, mlp=mlp, norm=LAYER_NORM, out=(None, "dropout"), final_norm="final_layernorm")


def fuyu(config: PreTrainedConfig) -> Architecture:
    return language_part(persimmon(config.get_text_config()), "language_model")
