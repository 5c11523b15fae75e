"""Cohere's Command: Llama with layer norms, attention and MLP side by side."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import llama_like
from adapters.norms import LAYER_NORM
from adapters.registry import only, register


@register("CoherePreTrainedModel", "Cohere2PreTrainedModel")
def cohere(config: PreTrainedConfig) -> Architecture:
    if hasattr(config, "use_qk_norm"):
        only(config, use_qk_norm=False)  # its norms have weights for each head
    return _side_by_side(config, {"rotary_adjacent_pairs": True})


@register("CohereCompassForCausalLM", "CohereCompassTextModel")
def compass(config: PreTrainedConfig) -> Architecture:
    return _side_by_side(config, {})


def _side_by_side(config: PreTrainedConfig, values: dict[str, object]) -> Architecture:
    pre = ("input_layernorm", "input_layernorm")
    return llama_like(config, norm=LAYER_NORM, pre=pre, parallel=True, config_values=values)
