"""Llama and the families that have its shape."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, language_part
from adapters.attention import Attention, Projection
from adapters.config import first
from adapters.families.shapes.gpt2 import in_a_row
from adapters.families.shapes.llama import (
    ATTENTION,
    FEED_FORWARD,
    HEADS_FIRST,
    NORMED_ATTENTION,
    fused_gate,
    llama_like,
    normed,
)
from adapters.feed_forward import MLP
from adapters.norms import LAYER_NORM, NormKind
from adapters.registry import only
from adapters.views import interleaved

__all__ = ["ATTENTION", "FEED_FORWARD", "UNGATED", "arcee", "llama", "llama_like"]
#: Llama's MLP without a gate.
UNGATED = MLP("mlp", up=Projection("up_proj"), down="down_proj")
_SAME_SHAPE = ("Cwm", "Llama", "Ministral", "Ministral3", "Mistral", "SeedOss", "SmolLM3")


def llama(config: PreTrainedConfig) -> Architecture:
    return llama_like(config)


def arcee(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, mlp=UNGATED)


# --------------------------------------------------------------------------------------------------
# Qwen 2 and Qwen 3.
# --------------------------------------------------------------------------------------------------


# Their tokenizers have no beginning-of-sequence token.
VALUES = {"default_prepend_bos": False}


def qwen2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, config_values=VALUES)


def qwen3(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_ATTENTION, config_values=VALUES)


# --------------------------------------------------------------------------------------------------
# StableLM: Llama with layer norms, partly rotated.
# --------------------------------------------------------------------------------------------------


def stablelm(config: PreTrainedConfig) -> Architecture:
    attn = ATTENTION
    if config.qk_layernorm:
        kind = NormKind("layer", eps=config.layer_norm_eps, inside="norms")
        attn = replace(
            normed(ATTENTION, "q_layernorm", "k_layernorm", kind), norms_over="heads first"
        )
    parallel = config.use_parallel_residual
    pre = ("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm")
    return llama_like(
        config, attn=attn, norm=LAYER_NORM, pre=pre, out=(None, "dropout"), parallel=parallel
    )


# --------------------------------------------------------------------------------------------------
# Apertus: Llama without gates, with an activation function that is learned.
# --------------------------------------------------------------------------------------------------


def apertus(config: PreTrainedConfig) -> Architecture:
    learned = config.hidden_act == "xielu"
    return llama_like(
        config,
        attn=HEADS_FIRST,
        mlp=replace(UNGATED, activation="act_fn") if learned else UNGATED,
        pre=("attention_layernorm", "feedforward_layernorm"),
        config_values={"act_fn": None} if learned else {},
    )


# --------------------------------------------------------------------------------------------------
# StarCoder 2, and other Llamas with layer norms and without gates.
# --------------------------------------------------------------------------------------------------


def starcoder2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=LAYER_NORM, mlp=MLP("mlp", up=Projection("c_fc"), down="c_proj"))


def jais2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=LAYER_NORM, mlp=UNGATED)


def nemotron(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=NormKind("layer", offset=1.0), mlp=UNGATED)


# --------------------------------------------------------------------------------------------------
# Phi-3 and Phi-4: Llama with fused projections.
# --------------------------------------------------------------------------------------------------


def phi3(config: PreTrainedConfig) -> Architecture:
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    d_head = first(config, "head_dim") or config.hidden_size // heads
    q, k, v = in_a_row("qkv_proj", d_head, heads, kv_heads)
    attn = replace(ATTENTION, q=q, k=k, v=v)
    gate, up = fused_gate("gate_up_proj", config.intermediate_size)
    mlp = MLP("mlp", up=up, gate=gate, down="down_proj")
    return llama_like(config, attn=attn, mlp=mlp, out=("resid_attn_dropout", "resid_mlp_dropout"))


# --------------------------------------------------------------------------------------------------
# Cohere's Command: Llama with layer norms, attention and MLP side by side, and a factor on its
# logits.
# --------------------------------------------------------------------------------------------------


def cohere(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "use_qk_norm"):
        only(config, use_qk_norm=False)  # its norms have weights for each head
    return _side_by_side(config, {"rotary_adjacent_pairs": True})


def compass(config: PreTrainedConfig) -> Architecture:
    return _side_by_side(config, {})


def _side_by_side(config: PreTrainedConfig, values: dict[str, object]) -> Architecture:
    pre = ("input_layernorm", "input_layernorm")
    factor = 1.0 if config.logit_scale is None else config.logit_scale
    return llama_like(
        config, norm=LAYER_NORM, pre=pre, parallel=True, logit_factor=factor, config_values=values
    )


# --------------------------------------------------------------------------------------------------
# Moshi's language model: Llama with gate and up in one projection.
# --------------------------------------------------------------------------------------------------


def moshi(config: PreTrainedConfig) -> Architecture:
    width = config.ffn_dim // 2
    q, k, v = (Projection(f"{letter}_proj.linear") for letter in "qkv")
    gate, up = fused_gate("fc1", width)
    return llama_like(
        config,
        attn=Attention("self_attn", q, k, v, o="o_proj.linear", rotary="last"),
        mlp=MLP("mlp", up=up, gate=gate, down="fc2"),
        # Its configuration has a window, which it does not use.
        config_values={
            "d_mlp": width,
            "use_local_attn": False,
            "window_size": None,
            "attn_types": None,
        },
    )


# --------------------------------------------------------------------------------------------------
# Persimmon, and the text of Fuyu: queries, keys and values fused head by head.
# --------------------------------------------------------------------------------------------------


def persimmon(config: PreTrainedConfig) -> Architecture:
    q, k, v = (
        Projection("query_key_value", interleaved(config.num_attention_heads, i)) for i in range(3)
    )
    attn = Attention("self_attn", q, k, v, o="dense", rotary="last")
    if config.qk_layernorm:
        attn = normed(attn, "q_layernorm", "k_layernorm", LAYER_NORM)
    mlp = MLP("mlp", up=Projection("dense_h_to_4h"), down="dense_4h_to_h")
    return llama_like(
        config,
        attn=attn,
        mlp=mlp,
        norm=LAYER_NORM,
        out=(None, "dropout"),
        final_norm="final_layernorm",
    )


def fuyu(config: PreTrainedConfig) -> Architecture:
    return language_part(persimmon(config.get_text_config()), "language_model")
