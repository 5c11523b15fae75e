"""Types that were offered in part only: all of what a block computes has hook points now, and is proved."""

from __future__ import annotations

import pytest

from adapters import verify
from benchmarks.models import how_much
from bridge import TransformerBridge
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("model_type", ["kimi_linear", "mimo_v2_flash"])
def test_it_is_offered_in_full_and_proved(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    report = verify(bridge)
    assert how_much(bridge) == "full" and report.passed, f"{bridge.offered()}\n{report}"
