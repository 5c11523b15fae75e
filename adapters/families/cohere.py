"""Cohere's Command: Llama with layer norms, attention and MLP side by side, and a factor on its logits."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import llama_like
from adapters.norms import LAYER_NORM
from adapters.registry import only


def cohere(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "use_qk_norm"):
        only(config, use_qk_norm=False)  # its norms have weights for each head
    return _side_by_side(config, {"rotary_adjacent_pairs": True})


def compass(config: PreTrainedConfig) -> Architecture:
    return _side_by_side(config, {})


def _side_by_side(config: PreTrainedConfig, values: dict[str, object]) -> Architecture:
    pre = ("input_layernorm", "input_layernorm")
    factor = 1.0 if config.logit_scale is None else config.logit_scale
    return llama_like(config, norm=LAYER_NORM, pre=pre, parallel=True, logit_factor=factor, config_values=values)
