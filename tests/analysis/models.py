"""Tiny models of every family, and of what HookedTransformer has no decomposition for."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bridge import NativeConfig, TransformerBridge
from tests.conftest import FAMILIES, tiny

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
}
GQA, WIDE = {"num_key_value_heads": 2}, {"head_dim": 12}
GPTJ = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 20,
    "rotary_dim": 4,
}
OPT = {name: size for name, size in SIZES.items() if name != "intermediate_size"}

HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SIZES | GQA | WIDE | {"attention_bias": True}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | GQA | WIDE),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SIZES | GQA),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPTJ),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT | {"ffn_dim": 28, "word_embed_proj_dim": 32}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES | GQA | WIDE),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES | GQA | {"num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
}
BASE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_vocab": 61, "n_ctx": 20, "seed": 0}
NATIVE: dict[str, dict[str, Any]] = {
    "native-solu_ln": {"act_fn": "solu_ln"},
    "native-attn_only": {"attn_only": True},
    "native-no_norm": {"act_fn": "relu", "normalization_type": None},
    "native-shortformer": {"act_fn": "gelu", "positional_embedding_type": "shortformer"},
    "native-final_rms": {"act_fn": "gelu", "final_rms": True},
}
CASES = [*FAMILIES, *HUGGING_FACE, *NATIVE]
EXPERTS = ["mixtral"]


def bridge_of(case: str) -> TransformerBridge:
    """A model in evaluation mode with no parameter left at a trivial value."""
    with torch.random.fork_rng():
        torch.manual_seed(len(case))
        if case in FAMILIES:
            return TransformerBridge(tiny(case))
        if case in NATIVE:
            bridge = TransformerBridge.boot_native(NativeConfig(**BASE, **NATIVE[case]))
        else:
            cls, config, fields = HUGGING_FACE[case]
            bridge = TransformerBridge(
                getattr(transformers, cls)(getattr(transformers, config)(**fields))
            )
        with torch.no_grad():
            for parameter in bridge.original_model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return bridge.eval()
