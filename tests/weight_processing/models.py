"""Tiny models of all families that can be processed."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bridge import TransformerBridge
from tests.adapters.by_hand import families

_SIZES = families.SIZES
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20}
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "gpt2-scaled-by-layer": (
        "GPT2",
        _GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 20},
    ),
    "gpt_neox": ("GPTNeoX", _SIZES),
    "gpt_neox-serial-tied": (
        "GPTNeoX",
        _SIZES | {"use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "bloom": ("Bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("OPT", families.OPT | {"word_embed_proj_dim": 32}),
    "llama": ("Llama", _SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-bias": (
        "Llama",
        _SIZES | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("Mistral", _SIZES | {"num_key_value_heads": 2, "sliding_window": 4}),
    "qwen2": ("Qwen2", _SIZES | {"num_key_value_heads": 2}),
    "qwen2-mha": ("Qwen2", _SIZES | {"num_key_value_heads": 4}),
}
CASES = sorted({*_OWN, *families.CASES})
#: One for each way in which biases are kept.
SAVED = [
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "bloom",
    "opt-no-bias",
    "phi",
    "phi-gqa-normed",
    "llama",
    "mixtral-gqa",
    "gpt_oss-gqa",
    "gpt_oss-mha-no-bias-tied",
    "qwen2_moe-gqa",
    "qwen2_moe-equal-widths",
    "qwen2",
    "gemma2-mha-bias",
]


def tiny(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a case, in evaluation mode, with no parameter left at a trivial value."""
    if case not in _OWN:
        return families.tiny(case).to(dtype)
    family, fields = _OWN[case]
    with torch.random.fork_rng():
        torch.manual_seed(len(case))
        head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        model = getattr(transformers, head)(getattr(transformers, f"{family}Config")(**fields))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def tokens(length: int = 9) -> Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(3))


def log_probs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits.float().log_softmax(-1)


def processed(case: str, **choices: Any) -> TransformerBridge:
    bridge = TransformerBridge(tiny(case))
    bridge.process_weights(**choices)
    return bridge


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, values: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return set(now) == set(values) and all(
        torch.equal(value, now[name]) for name, value in values.items()
    )
