"""HookedTransformer's own numbers (data/reference/README.md), and how a bridge is compared with
them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bridge import TransformerBridge

DATA = Path(__file__).parent / "data" / "reference"
FAMILIES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


@cache
def reference(family: str) -> dict[str, Tensor]:
    return load_file(DATA / family / "reference.safetensors")


def entries(family: str, kind: str, mode: str) -> dict[str, Tensor]:
    """The reference's tensors of a kind in a mode (``raw`` or ``processed``) and its ``_fine`` one,
    by name.
    """
    starts = (f"{mode}/{kind}/", f"{mode}_fine/{kind}/")
    found = {
        key.split("/", 2)[2]: value
        for key, value in reference(family).items()
        if key.startswith(starts)
    }
    assert found, f"the reference of {family} has no {kind} in mode {mode}"
    return found


def agree(ours: Tensor, right: Tensor) -> bool:
    # HookedTransformer norms queries and keys in one row for each head.
    same_size = ours.numel() == right.numel() and (ours.shape == right.shape or right.ndim == 2)
    return same_size and torch.allclose(ours.reshape(right.shape), right, atol=2e-4, rtol=1e-3)


def wrong_logits(bridge: TransformerBridge, family: str, mode: str) -> bool:
    with torch.no_grad():
        logits = bridge(reference(family)["tokens"])
    return not agree(logits.log_softmax(-1), reference(family)[f"{mode}/logits"].log_softmax(-1))


def wrong_values(bridge: TransformerBridge, family: str, mode: str) -> list[str]:
    """The hook points whose values differ."""
    right = entries(family, "cache", mode)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(reference(family)["tokens"], names_filter=list(right))
    return [name for name in right if not agree(cache[name], right[name])]


def wrong_effects(bridge: TransformerBridge, family: str, mode: str) -> list[str]:
    """The hook points at which halving the activation has another effect."""
    tokens, wrong = reference(family)["tokens"], []
    with torch.no_grad():
        for name, right in entries(family, "halved", mode).items():
            logits = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 0.5)])[
                :, -right.shape[1] :
            ]
            if not torch.allclose(logits.log_softmax(-1), right.log_softmax(-1), atol=2e-3):
                wrong.append(name)
    return wrong


def wrong_gradients(bridge: TransformerBridge, family: str, mode: str) -> list[str]:
    """The hook points at which the gradient differs."""
    tokens, wrong = reference(family)["tokens"], []
    found: list[Tensor] = []
    for name, right in entries(family, "grad", mode).items():
        logits = bridge.run_with_hooks(
            tokens, bwd_hooks=[(name, lambda grad, hook: found.append(grad.clone()))]
        )
        (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
        # The norm before attention is computed for queries, keys and values; the gradient that
        # stays is the last.
        if not agree(found[-1], right):
            wrong.append(name)
    return wrong


def reference_model(family: str) -> TransformerBridge:
    """The model whose numbers they are. HookedTransformer caps Gemma 2's scores, which not every
    sdpa does.
    """
    options = {"attn_implementation": "eager"} if family == "gemma2" else {}
    return TransformerBridge.boot_transformers(str(DATA / family), **options).eval()
