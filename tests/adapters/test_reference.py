"""Every hook point against HookedTransformer: values, effects of halving, gradients
(data/reference/README.md).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bridge import TransformerBridge
from tests.reference import (
    FAMILIES,
    reference,
    reference_model,
    wrong_effects,
    wrong_gradients,
    wrong_logits,
    wrong_values,
)


@cache
def bridge_of(family: str) -> TransformerBridge:
    return reference_model(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    right = reference(family)
    with torch.no_grad():
        logits = bridge_of(family)(right["tokens"])
    torch.testing.assert_close(logits, right["hf_logits"], atol=1e-5, rtol=1e-5)
    assert not wrong_logits(bridge_of(family), family, "raw")


@pytest.mark.parametrize("family", FAMILIES)
def test_values(family: str) -> None:
    assert not wrong_values(bridge_of(family), family, "raw")


@pytest.mark.parametrize("family", FAMILIES)
def test_effects_of_halving(family: str) -> None:
    assert not wrong_effects(bridge_of(family), family, "raw")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    assert not wrong_gradients(bridge_of(family), family, "raw")
