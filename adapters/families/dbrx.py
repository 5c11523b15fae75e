"""DBRX."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, Embedding, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MoE
from adapters.norms import LAYER_NORM, Norm
from adapters.views import columns


def dbrx(config: PreTrainedConfig) -> Architecture:
    """Queries, keys and values are one layer's, clamped; its router returns logits alone."""
    own, mixture = config.attn_config, config.ffn_config
    n_heads, n_kv_heads, d_head = config.n_heads, own.kv_n_heads, config.d_model // config.n_heads
    ends = [n * d_head for n in (0, n_heads, n_heads + n_kv_heads, n_heads + 2 * n_kv_heads)]
    q, k, v = (
        Projection("Wqkv", columns(ends[i], ends[i + 1], n)) for i, n in enumerate((n_heads, n_kv_heads, n_kv_heads))
    )
    attention = Attention("norm_attn_norm.attn", q, k, v, o="out_proj", rotary="last")
    if own.clip_qkv is not None:
        attention = replace(attention, clamp=(own.clip_qkv, "made"))
    moe = MoE("ffn", router="router", router_returns=("logits",))
    steps = (
        Step(attention, pre=Norm("norm_attn_norm.norm_1", LAYER_NORM)),
        Step(moe, pre=Norm("norm_attn_norm.norm_2", LAYER_NORM)),
    )
    values = {
        "positional_embedding_type": "rotary",
        "rotary_dim": d_head,
        "rotary_base": own.rope_theta,
        "n_key_value_heads": n_kv_heads,
        "num_experts": mixture.moe_num_experts,
        "experts_per_token": mixture.moe_top_k,
        "d_mlp": mixture.ffn_hidden_size,
        "d_expert": mixture.ffn_hidden_size,
        "act_fn": mixture.ffn_act_fn.get("name", "silu"),
        "gated_mlp": True,
    }
    stack = Stack("blocks", Block(steps), {}, Norm("norm_f", LAYER_NORM), Embedding("wte"))
    return Architecture((stack,), Readout("lm_head"), config_values=values)
