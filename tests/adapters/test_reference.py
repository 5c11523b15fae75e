"""Every hook point against HookedTransformer: values, effects of halving, gradients (data/reference/README.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bridge import TransformerBridge

DATA = Path(__file__).parents[1] / "data" / "reference"
FAMILIES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
MODES = ("raw", "raw_fine")


@cache
def bridge_of(family: str) -> TransformerBridge:
    return TransformerBridge.boot_transformers(str(DATA / family)).eval()


@cache
def reference(family: str) -> dict[str, Tensor]:
    return load_file(DATA / family / "reference.safetensors")


def entries(family: str, kind: str) -> dict[str, Tensor]:
    """The reference's tensors of a kind, by hook name."""
    starts = tuple(f"{mode}/{kind}/" for mode in MODES)
    found = {key.split("/", 2)[2]: value for key, value in reference(family).items() if key.startswith(starts)}
    assert found, f"the reference of {family} has no {kind}"
    return found


def agree(ours: Tensor, right: Tensor) -> bool:
    # HookedTransformer norms queries and keys in one row for each head.
    same_size = ours.numel() == right.numel() and (ours.shape == right.shape or right.ndim == 2)
    return same_size and torch.allclose(ours.reshape(right.shape), right, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    right = reference(family)
    with torch.no_grad():
        logits = bridge_of(family)(right["tokens"])
    torch.testing.assert_close(logits, right["hf_logits"], atol=1e-5, rtol=1e-5)
    assert agree(logits.log_softmax(-1), right["raw/logits"].log_softmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_values(family: str) -> None:
    right = entries(family, "cache")
    with torch.no_grad():
        _, cache = bridge_of(family).run_with_cache(reference(family)["tokens"], names_filter=list(right))
    assert not [name for name in right if not agree(cache[name], right[name])]


@pytest.mark.parametrize("family", FAMILIES)
def test_effects_of_halving(family: str) -> None:
    bridge, tokens, wrong = bridge_of(family), reference(family)["tokens"], []
    with torch.no_grad():
        for name, right in entries(family, "halved").items():
            logits = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 0.5)])[:, -right.shape[1] :]
            if not torch.allclose(logits.log_softmax(-1), right.log_softmax(-1), atol=2e-3):
                wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    bridge, tokens, wrong = bridge_of(family), reference(family)["tokens"], []
    found: list[Tensor] = []
    for name, right in entries(family, "grad").items():
        logits = bridge.run_with_hooks(tokens, bwd_hooks=[(name, lambda grad, hook: found.append(grad.clone()))])
        (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
        # The norm before attention is computed for queries, keys and values; the gradient that stays is the last.
        if not agree(found[-1], right):
            wrong.append(name)
    assert not wrong
