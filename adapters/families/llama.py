"""Llama and the families that have its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.config import rotary_facts
from adapters.norms import RMS_NORM
from adapters.registry import register

_NOTHING: Mapping[str, Any] = {}
_SAME_SHAPE = ("Cwm", "Llama", "Ministral", "Mistral", "SeedOss", "SmolLM3")


@register(*(f"{name}PreTrainedModel" for name in _SAME_SHAPE))
def llama(config: Any) -> Architecture:
    return Architecture(
        embed="embed_tokens",
        blocks="layers",
        block=Block(
            ln1="input_layernorm",
            attn=Attention(
                "self_attn", Projection("q_proj"), Projection("k_proj"), Projection("v_proj"), o="o_proj", rotary=True
            ),
            ln2="post_attention_layernorm",
            mlp=MLP("mlp", up=Projection("up_proj"), gate=Projection("gate_proj"), down="down_proj"),
            norm=RMS_NORM,
        ),
        final_norm="norm",
        unembed="lm_head",
        facts=rotary_facts(config),
    )


def llama_like(
    config: Any,
    *,
    attn: Mapping[str, Any] = _NOTHING,
    block: Mapping[str, Any] = _NOTHING,
    facts: Mapping[str, Any] = _NOTHING,
) -> Architecture:
    """Llama with differences.

    Args:
        config: the Hugging Face configuration.
        attn, block, facts: the fields of `Attention` and `Block`, and the facts, that differ.
    """
    base = llama(config)
    assert base.block.attn is not None
    changed = replace(base.block, attn=replace(base.block.attn, **attn), **block)
    return replace(base, block=changed, facts={**base.facts, **facts})
