"""The promises that are checked whatever the family: which runs they are checked in."""

from __future__ import annotations

import pytest
import torch

from adapters.proofs.mechanics import Mechanics
from bridge import TransformerBridge
from tests.tiny_models import tiny_model

TOKENS = torch.arange(3, 12)[None]


def test_runs_start_at_the_first_middle_and_last_layer_and_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge = TransformerBridge(tiny_model("llama", num_hidden_layers=6))
    own, started = TransformerBridge.forward, []

    def forward(self, *args, **kwargs):
        if "start_at_layer" in kwargs and "stop_at_layer" not in kwargs:
            started.append(kwargs["start_at_layer"])
        return own(self, *args, **kwargs)

    monkeypatch.setattr(TransformerBridge, "forward", forward)
    with torch.no_grad():
        checks = Mechanics(bridge, TOKENS, {}, 1e-4).full()
    assert started == [0, 3, 5, 6]
    assert all(check.passed for check in checks)
