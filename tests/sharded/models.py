"""Tiny random models that several processes load, and what they are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXTURE = {"num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 8,
}
#: The classes, and the sizes that are theirs.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_eager": ("Llama", {"attn_implementation": "eager"}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3", {"head_dim": 16}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "phi": ("Phi", {}),
    "llama_odd": ("Llama", {"intermediate_size": 95}),
    "llama_of_three_keys": (
        "Llama",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    ),
    "phi3": ("Phi3", {}),
    "starcoder2": ("Starcoder2", {}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "glm": ("Glm", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **_MIXTURE}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **_MIXTURE},
    ),
    "gpt2": ("GPT2", {"tie_word_embeddings": False}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "attn_implementation": "eager", **_MIXTURE},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            **_LATENT,
            **_MIXTURE,
        },
    ),
}
KINDS |= {
    "gpt_oss_of_heads": KINDS["gpt_oss"],
    "granite_swa": ("GraniteSWA", {"sliding_window": 4, "attn_implementation": "eager"}),
    "nanochat": ("NanoChat", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, **_MIXTURE}),
    "minicpm3": ("MiniCPM3", {**_LATENT, "num_key_value_heads": 4}),
    "deepseek_v2": ("DeepseekV2", KINDS["deepseek_v3"][1] | {"n_group": 1}),
}
_HEADS = "model.layers.*.self_attn"
#: How kinds are cut that have no plan of their own for that.
PLANS = {
    "gpt_oss_of_heads": {
        **{f"{_HEADS}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")},
        f"{_HEADS}.o_proj": "rowwise",
        _HEADS: "local_params",
    },
}
#: Mixtures whose experts are spread by number.
KINDS |= {f"{kind}_by_expert": KINDS[kind] for kind in ("mixtral", "qwen3_moe", "gpt_oss")}
#: With as many heads of keys as four processes.
OF_FOUR = {
    f"{kind}_of_four": (KINDS[kind][0], {**KINDS[kind][1], "num_key_value_heads": 4})
    for kind in ("llama", "gemma2", "qwen3_moe", "qwen3_moe_by_expert")
}
_HALF_ROTATED = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
_EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8}
#: For eight processes. Of the last five transformers gives every process all heads: four of keys
#: are enough for eight.
OF_EIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_of_eight": ("Llama", _EIGHT),
    "qwen2_of_eight": ("Qwen2", _EIGHT),
    "mistral_of_eight": ("Mistral", {**_EIGHT, "sliding_window": 4}),
    "gemma2_of_eight": ("Gemma2", {**KINDS["gemma2"][1], **_EIGHT}),
    "qwen3_moe_by_expert_of_eight": (
        "Qwen3Moe",
        {
            **_EIGHT,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
        },
    ),
    **{
        f"{kind}_of_four_keys": (name, {**_EIGHT, "num_key_value_heads": 4, **own})
        for kind, name, own in (
            ("olmo2", "Olmo2", {}),
            ("olmo3", "Olmo3", {"sliding_window": 4}),
            ("phi3", "Phi3", {}),
            ("flex_olmo", "FlexOlmo", {"num_experts": 4, **_MIXTURE}),
            (
                "minimax_m2",
                "MiniMaxM2",
                {"head_dim": 16, "num_local_experts": 4, **_HALF_ROTATED, **_MIXTURE},
            ),
        )
    },
    "llama_of_four_keys": ("Llama", {**_EIGHT, "num_key_value_heads": 4}),
}

TOKENS = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(1))


def save(kind: str, folder: Path) -> None:
    """Saves a model whose weights are random everywhere."""
    name, own = (KINDS | OF_FOUR | OF_EIGHT)[kind]
    config_class = getattr(
        transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**_SIZES | own))
    with torch.no_grad():
        for parameter in model.parameters():
            (
                parameter.mul_(4.0)
                if parameter.ndim > 1
                else parameter.add_(0.1 * torch.randn_like(parameter))
            )
    model.save_pretrained(folder / kind)


def load(
    kind: str, folder: Path, dtype: torch.dtype = torch.float64, **how: Any
) -> PreTrainedModel:
    """Loads one, whole or spread over processes; in float64, for sums of parts come in another
    order.
    """
    own = (KINDS | OF_FOUR | OF_EIGHT)[kind][1]
    attention = own.get("attn_implementation", "sdpa")
    if "num_experts_per_tok" in own:
        how["experts_implementation"] = "batched_mm"  # that of grouped products knows no float64
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder / kind, dtype=dtype, attn_implementation=attention, **how
    )
    if dist.is_initialized() and dist.get_backend() == "nccl" and "distributed_config" not in how:
        model.to(torch.cuda.current_device())
    return model.eval()


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinities at the same places are equal."""
    assert not isinstance(a, DTensor)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).masked_fill(a == b, 0).abs().max()) if a.numel() else 0.0
