"""A processed model against HookedTransformer's, processed: weights, values, effects, gradients."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bridge import TransformerBridge
from tests.reference import (
    FAMILIES,
    entries,
    reference,
    reference_model,
    wrong_effects,
    wrong_gradients,
    wrong_logits,
    wrong_values,
)

FAMILIES = [family for family in FAMILIES if family != "bert"]  # HookedEncoder has no processing


@cache
def bridge_of(family: str) -> TransformerBridge:
    bridge = reference_model(family)
    bridge.enable_compatibility_mode()
    return bridge


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    bridge, right = bridge_of(family), reference(family)["processed/logits"]
    assert not wrong_logits(bridge, family, "processed")
    with torch.no_grad():
        torch.testing.assert_close(bridge(reference(family)["tokens"]), right, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights(family: str) -> None:
    ours, right = bridge_of(family).tl_parameters(), entries(family, "param", "processed")
    # HookedTransformer has a table of positions beside ALiBi, which it never reads.
    assert [name for name in right if name not in ours] == (
        ["pos_embed.W_pos"] if family == "bloom" else []
    )
    wrong = [
        n
        for n, x in right.items()
        if n in ours and not torch.allclose(ours[n], x, atol=2e-4, rtol=1e-3)
    ]
    assert not wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_values(family: str) -> None:
    assert not wrong_values(bridge_of(family), family, "processed")


@pytest.mark.parametrize("family", FAMILIES)
def test_effects_of_halving(family: str) -> None:
    assert not wrong_effects(bridge_of(family), family, "processed")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    assert not wrong_gradients(bridge_of(family), family, "processed")
