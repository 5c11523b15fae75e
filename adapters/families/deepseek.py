"""DeepSeek, and others whose keys and values are made from one latent."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.latent import latent_attention, latent_values
from adapters.families.shapes.llama import llama_like
from adapters.families.shapes.mixture import SHARED, SIGMOID, dense_first, dense_listed, mixture_like
from adapters.feed_forward import ChosenBy, MoE


def deepseek_v2(config: PreTrainedConfig) -> Architecture:
    chosen_by: ChosenBy = "probabilities" if config.topk_method == "greedy" else "corrected probabilities"
    moe = MoE("mlp", router="gate", shared=SHARED, chosen_by=chosen_by)
    values = latent_values(config) | {"rotary_adjacent_pairs": True}
    return _mixed(config, moe, dense_first(config), values)


def deepseek_v3(config: PreTrainedConfig) -> Architecture:
    return _mixed(config, SIGMOID, dense_first(config), latent_values(config))


def glm4_moe_lite(config: PreTrainedConfig) -> Architecture:
    return _mixed(config, SIGMOID, dense_listed(config), latent_values(config))


def youtu(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=latent_attention(config), config_values=latent_values(config))


def minicpm3(config: PreTrainedConfig) -> Architecture:
    factor = config.scale_depth / config.num_hidden_layers**0.5
    attn, values = latent_attention(config), latent_values(config)
    declared = llama_like(config, attn=attn, factor=factor, config_values=values)
    return replace(declared, readout=replace(declared.readout, factor_in=1 / config.logits_scaling))


def _mixed(config: PreTrainedConfig, moe: MoE, dense: range | list[int], values: dict[str, object]) -> Architecture:
    width = config.moe_intermediate_size
    shared, attn = width * config.n_shared_experts, latent_attention(config)
    return mixture_like(
        config, moe, config.n_routed_experts, width, shared, dense=dense, attn=attn, config_values=values
    )
