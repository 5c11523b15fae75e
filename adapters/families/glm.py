"""GLM: Llama with gate and up in one projection, partly rotated."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import ATTENTION, NORMED_ATTENTION, fused_gate, llama_like
from adapters.families.shapes.mixture import SIGMOID, dense_first, mixture_like
from adapters.feed_forward import MLP

POST = ("post_self_attn_layernorm", "post_mlp_layernorm")
PAIRS = {"rotary_adjacent_pairs": True}


def _mlp(config: PreTrainedConfig) -> MLP:
    gate, up = fused_gate("gate_up_proj", config.intermediate_size)
    return MLP("mlp", up=up, gate=gate, down="down_proj")


def glm(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, mlp=_mlp(config), config_values=PAIRS)


def glm4(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, mlp=_mlp(config), post=POST, config_values=PAIRS)


def glm4_moe(config: PreTrainedConfig) -> Architecture:
    width = config.moe_intermediate_size
    attn = NORMED_ATTENTION if getattr(config, "use_qk_norm", False) else ATTENTION
    shared = width * config.n_shared_experts
    return mixture_like(config, SIGMOID, config.n_routed_experts, width, shared, dense=dense_first(config), attn=attn)
