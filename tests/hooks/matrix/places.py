"""Where canonical activations stand in the Hugging Face modules, written down by hand: no adapter
is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

LLAMA = {
    "z": ("self_attn.o_proj", "input"),
    "post": ("mlp.down_proj", "input"),
    "mlp_out": ("mlp", "output"),
    "attn_out": ("self_attn.o_proj", "output"),
    "q": ("self_attn.q_proj", "output"),
    "k": ("self_attn.k_proj", "output"),
    "v": ("self_attn.v_proj", "output"),
}
MIXTURE = {key: place for key, place in LLAMA.items() if key != "post"}
GEMMA2 = LLAMA | {
    "attn_out": ("post_attention_layernorm", "output"),
    "mlp_out": ("post_feedforward_layernorm", "output"),
}
FUSED = ("q", "k", "v")


def but(places: dict[str, tuple[str, str]], *left_out: str) -> dict[str, tuple[str, str]]:
    return {key: place for key, place in places.items() if key not in left_out}


#: By family: where its blocks are, and inside a block which module's input or output an activation
#: is.
PLACES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "gpt2": (
        "transformer.h",
        {
            "z": ("attn.c_proj", "input"),
            "attn_out": ("attn.c_proj", "output"),
            "post": ("mlp.c_proj", "input"),
            "mlp_out": ("mlp.c_proj", "output"),
        },
    ),
    "gpt_neo": (
        "transformer.h",
        {
            "z": ("attn.attention.out_proj", "input"),
            "attn_out": ("attn.attention.out_proj", "output"),
            "q": ("attn.attention.q_proj", "output"),
            "k": ("attn.attention.k_proj", "output"),
            "v": ("attn.attention.v_proj", "output"),
            "post": ("mlp.c_proj", "input"),
            "mlp_out": ("mlp.c_proj", "output"),
        },
    ),
    "gptj": (
        "transformer.h",
        {
            "z": ("attn.out_proj", "input"),
            "attn_out": ("attn.out_proj", "output"),
            "q": ("attn.q_proj", "output"),
            "v": ("attn.v_proj", "output"),
            "post": ("mlp.fc_out", "input"),
            "mlp_out": ("mlp.fc_out", "output"),
        },
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        {
            "z": ("attention.dense", "input"),
            "attn_out": ("attention.dense", "output"),
            "post": ("mlp.dense_4h_to_h", "input"),
            "mlp_out": ("mlp.dense_4h_to_h", "output"),
        },
    ),
    "opt": (
        "model.decoder.layers",
        {
            "z": ("self_attn.out_proj", "input"),
            "attn_out": ("self_attn.out_proj", "output"),
            "q": ("self_attn.q_proj", "output"),
            "k": ("self_attn.k_proj", "output"),
        },
    ),
    "bloom": (
        "transformer.h",
        {
            "z": ("self_attention.dense", "input"),
            "attn_out": ("self_attention.dense", "output"),
            "post": ("mlp.dense_4h_to_h", "input"),
            "mlp_out": ("mlp.dense_4h_to_h", "output"),
        },
    ),
    "phi": (
        "model.layers",
        {
            "z": ("self_attn.dense", "input"),
            "attn_out": ("self_attn.dense", "output"),
            "q": ("self_attn.q_proj", "output"),
            "post": ("mlp.fc2", "input"),
            "mlp_out": ("mlp", "output"),
        },
    ),
    "phi3-gqa": ("model.layers", but(LLAMA, *FUSED)),
    "bert": (
        "bert.encoder.layer",
        {
            "z": ("attention.output.dense", "input"),
            "attn_out": ("attention.output.dense", "output"),
            "q": ("attention.self.query", "output"),
            "post": ("output.dense", "input"),
            "mlp_out": ("output.dense", "output"),
        },
    ),
    "t5": (
        "decoder.block",
        {
            "z": ("layer.0.SelfAttention.o", "input"),
            "attn_out": ("layer.0.SelfAttention.o", "output"),
            "q": ("layer.0.SelfAttention.q", "output"),
            "k": ("layer.0.SelfAttention.k", "output"),
            "v": ("layer.0.SelfAttention.v", "output"),
            "post": ("layer.2.DenseReluDense.wo", "input"),
            "mlp_out": ("layer.2.DenseReluDense.wo", "output"),
            "cross_z": ("layer.1.EncDecAttention.o", "input"),
            "cross_out": ("layer.1.EncDecAttention.o", "output"),
        },
    ),
    "gemma2-gqa": ("model.layers", GEMMA2),
    "gemma3-gqa": ("model.layers", GEMMA2),
    "mixtral-gqa": ("model.layers", MIXTURE),
    "gpt_oss-gqa": ("model.layers", MIXTURE),
    "qwen2_moe-gqa": ("model.layers", MIXTURE),
    "qwen3_moe-gqa": ("model.layers", MIXTURE),
} | dict.fromkeys(
    (
        "llama-gqa",
        "mistral-gqa-window",
        "qwen2-gqa",
        "qwen3-gqa",
        "gemma-mqa",
        "cwm-gqa",
        "ministral-gqa",
        "seed_oss-gqa",
        "smollm3-gqa",
        "helium-gqa",
        "ernie4_5-gqa",
    ),
    ("model.layers", LLAMA),
)

#: The canonical name of each, in a block.
NAMES = {
    "resid_pre": "hook_resid_pre",
    "resid_post": "hook_resid_post",
    "z": "attn.hook_z",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "attn_out": "hook_attn_out",
    "post": "mlp.hook_post",
    "mlp_out": "hook_mlp_out",
    "cross_z": "cross_attn.hook_z",
    "cross_out": "hook_cross_attn_out",
    "pattern": "attn.hook_pattern",
    "scores": "attn.hook_attn_scores",
}
#: What a family's blocks are called, where they are not ``blocks``.
STACKS = {"t5": "decoder"}


def name_of(case: str, key: str, layer: int) -> str:
    return f"{STACKS.get(case, 'blocks')}.{layer}.{NAMES[key]}"


def keys_of(case: str) -> list[str]:
    """What is compared in this family."""
    # HookedTransformer's encoder has `hook_resid_post` before the norm that ends the block.
    return ["resid_pre", *([] if case == "bert" else ["resid_post"]), *PLACES[case][1]]


@dataclass
class Place:
    """One place in a model."""

    module: nn.Module
    side: str

    def edit(self, fn: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Shows the tensor to a function, by a plain torch hook, and puts back what it returns."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                new = fn(args[0])
                return None if new is None else ((new, *args[1:]), kwargs)
            new = fn(kwargs["hidden_states"])
            return None if new is None else (args, kwargs | {"hidden_states": new})

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return fn(output)
            new = fn(output[0])
            return None if new is None else (new, *output[1:])

        if self.side == "input":
            return self.module.register_forward_pre_hook(before, with_kwargs=True)
        return self.module.register_forward_hook(after)


def place_of(core: nn.Module, case: str, key: str, layer: int) -> Place:
    """Where an activation stands in a model (without what wraps it)."""
    blocks, inside = PLACES[case]
    block = core.get_submodule(f"{blocks}.{layer}")
    if key.startswith("resid"):
        return Place(block, "input" if key == "resid_pre" else "output")
    path, side = inside[key]
    return Place(block.get_submodule(path), side)


def same(ours: Tensor, plain: Tensor, exact: bool, tolerance: float) -> str:
    """How two tensors differ, "" where they do not; heads and flattened rows count as their last
    axis.
    """
    plain = plain.reshape(ours.shape)
    if torch.equal(ours, plain):
        return ""
    worst = (ours.double() - plain.double()).abs().max().item()
    if exact or not worst <= tolerance:
        return f"differs by {worst:.2g}"
    return ""
