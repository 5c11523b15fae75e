"""StableLM: Llama with layer norms, partly rotated."""

from __future__ import annotations

from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import llama_like
from adapters.norms import LAYER_NORM
from adapters.registry import only


def stablelm(config: PreTrainedConfig) -> Architecture:
    only(config, qk_layernorm=False)  # each head has norms of its own
    parallel = config.use_parallel_residual
    pre = ("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm")
    return llama_like(config, norm=LAYER_NORM, pre=pre, out=(None, "dropout"), parallel=parallel)
