"""Gemma, Gemma 2 and Gemma 3 (text)."""

from __future__ import annotations

from typing import Any

from adapters.architecture import Architecture
from adapters.families.llama import llama_like
from adapters.norms import GEMMA_NORM
from adapters.registry import UnsupportedModelError, register

# From Gemma 2 on there is a norm on both sides of attention and MLP.
_BOTH_SIDES = {
    "norm": GEMMA_NORM,
    "ln1_post": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ln2_post": "post_feedforward_layernorm",
}


def _direction(config: Any) -> dict[str, Any]:
    return {"attention_dir": "bidirectional" if config.use_bidirectional_attention else "causal"}


def _scales(config: Any) -> dict[str, Any]:
    return {
        "attn_scale": config.query_pre_attn_scalar**0.5,
        "output_logits_soft_cap": config.final_logit_softcapping or -1.0,
    }


@register("GemmaPreTrainedModel")
def gemma(config: Any) -> Architecture:
    return llama_like(config, block={"norm": GEMMA_NORM}, facts=_direction(config))


@register("Gemma2PreTrainedModel")
def gemma2(config: Any) -> Architecture:
    cap = {"attn_scores_soft_cap": config.attn_logit_softcapping or -1.0}
    return llama_like(config, block=_BOTH_SIDES, facts=_direction(config) | _scales(config) | cap)


@register("Gemma3PreTrainedModel")
def gemma3(config: Any) -> Architecture:
    if hasattr(config, "vision_config"):
        raise UnsupportedModelError(
            "Gemma 3 with images (its configuration has a vision_config) has no adapter; its text model, "
            "Gemma3ForCausalLM, has one"
        )
    # Its configuration has attn_logit_softcapping, but its attention leaves the scores as they are.
    return llama_like(
        config,
        attn={"q_norm": "q_norm", "k_norm": "k_norm", "norm_heads_first": True},
        block={**_BOTH_SIDES, "qk_norm": GEMMA_NORM},
        facts=_direction(config) | _scales(config),
    )
