"""OLMo: Llama with norms in other places."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import NORMED_WIDTH, POST, llama_like
from adapters.families.shapes.mixture import mixture_like
from adapters.feed_forward import MoE
from adapters.norms import NormKind
from adapters.registry import only


def olmo(config: PreTrainedConfig) -> Architecture:
    only(config, clip_qkv=None)  # queries, keys and values would be changed in place
    return llama_like(config, norm=NormKind("layer", eps=1e-5))  # which its norm, without weights, keeps nowhere


def olmo2(config: PreTrainedConfig) -> Architecture:
    return llama_like(config, attn=NORMED_WIDTH, pre=(None, None), post=POST)


def olmoe(config: PreTrainedConfig) -> Architecture:
    only(config, clip_qkv=None)
    return mixture_like(
        config, MoE("mlp", router="gate"), config.num_experts, config.intermediate_size, attn=NORMED_WIDTH
    )


def flex_olmo(config: PreTrainedConfig) -> Architecture:
    moe = MoE("mlp", router="gate")
    return mixture_like(
        config, moe, config.num_experts, config.intermediate_size, attn=NORMED_WIDTH, pre=(None, None), post=POST
    )
