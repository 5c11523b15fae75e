"""StableLM: Llama with layer norms, partly rotated."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import ATTENTION, llama_like, normed
from adapters.norms import LAYER_NORM, NormKind


def stablelm(config: PreTrainedConfig) -> Architecture:
    attn = ATTENTION
    if config.qk_layernorm:
        kind = NormKind("layer", eps=config.layer_norm_eps, inside="norms")
        attn = replace(normed(ATTENTION, "q_layernorm", "k_layernorm", kind), norms_over="heads first")
    parallel = config.use_parallel_residual
    pre = ("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm")
    return llama_like(config, attn=attn, norm=LAYER_NORM, pre=pre, out=(None, "dropout"), parallel=parallel)
