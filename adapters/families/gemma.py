"""Gemma, Gemma 2 and Gemma 3, with images and without."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture, language_part
from adapters.families.shapes.llama import ATTENTION, POST, llama_like, normed
from adapters.norms import GEMMA_NORM

# From Gemma 2 on there is a norm on both sides of attention and MLP.
PRE = ("input_layernorm", "pre_feedforward_layernorm")


def _direction(config: PreTrainedConfig) -> dict[str, object]:
    return {"attention_dir": "bidirectional" if getattr(config, "use_bidirectional_attention", False) else "causal"}


def _scales(config: PreTrainedConfig) -> dict[str, object]:
    return _direction(config) | {"attn_scale": config.query_pre_attn_scalar**0.5}


def _cap(config: PreTrainedConfig) -> float | None:
    """The soft cap of the logits."""
    return config.final_logit_softcapping or None


def gemma(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, norm=GEMMA_NORM, config_values=_direction(config))


def gemma2(config: PreTrainedConfig) -> Architecture:
    cap = {"attn_scores_soft_cap": config.attn_logit_softcapping or -1.0}
    values = _scales(config) | cap
    return llama_like(config, norm=GEMMA_NORM, pre=PRE, post=POST, soft_cap=_cap(config), config_values=values)


def gemma3(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "vision_config"):  # with images: the same in the model of its text
        declared = language_part(gemma3(config.get_text_config()), "language_model")
        return replace(declared, readout=replace(declared.readout, soft_cap=None))  # which it leaves out
    attn = replace(normed(ATTENTION, "q_norm", "k_norm", GEMMA_NORM), norms_over="heads first")
    # Its configuration has attn_logit_softcapping, but its attention leaves the scores as they are.
    return llama_like(
        config, attn=attn, norm=GEMMA_NORM, pre=PRE, post=POST, soft_cap=_cap(config), config_values=_scales(config)
    )


def vaultgemma(config: PreTrainedConfig) -> Architecture:
    values = _scales(config) | {"attn_scores_soft_cap": config.attn_logit_softcapping or -1.0}
    return llama_like(config, norm=GEMMA_NORM, pre=PRE, soft_cap=_cap(config), config_values=values)
