"""Methods of the cache and of the model against HookedTransformer's own results
(data/reference/README.md).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge import ActivationCache
from tests.reference import DATA, FAMILIES, entries, reference, reference_model

FAMILIES = [
    family for family in FAMILIES if family != "bert"
]  # HookedEncoder's cache has no methods that work
#: Both modes run in every test of this file.
MODES = ["raw", "processed"]

METHODS: dict[str, Any] = {
    "decompose_resid": lambda c, **more: c.decompose_resid(**more),
    "decompose_resid_mlp_input_layer1": lambda c, **more: c.decompose_resid(
        1, mlp_input=True, **more
    ),
    "accumulated_resid": lambda c, **more: c.accumulated_resid(
        incl_mid=not c.model.cfg.parallel_attn_mlp, **more
    ),
    "accumulated_resid_apply_ln": lambda c, **more: c.accumulated_resid(apply_ln=True, **more),
    "stack_head_results": lambda c, **more: c.stack_head_results(**more),
    "get_full_resid_decomposition": lambda c, **more: c.get_full_resid_decomposition(
        expand_neurons=False, apply_ln=True, **more
    ),
    "logit_attrs": lambda c: c.logit_attrs(c.decompose_resid(), 7, 9, norm_weights=False),
    "composition_Q": lambda c: c.model.all_composition_scores("Q"),
    "composition_K": lambda c: c.model.all_composition_scores("K"),
    "composition_V": lambda c: c.model.all_composition_scores("V"),
    "accumulated_bias": lambda c: c.model.accumulated_bias(c.model.cfg.n_layers),
    "tokens_to_residual_directions": lambda c: c.model.tokens_to_residual_directions(
        torch.tensor([5, 7, 9])
    ),
}


@cache
def run(family: str, mode: str) -> ActivationCache:
    bridge = reference_model(family)
    if mode == "processed":
        bridge.enable_compatibility_mode()
    return bridge.run_with_cache(reference(family)["tokens"])[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_every_method_of_the_reference_is_here(family: str, mode: str) -> None:
    assert set(entries(family, "method", mode)) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_results(family: str, mode: str, method: str) -> None:
    ours, right = METHODS[method](run(family, mode)), reference(family)[f"{mode}/method/{method}"]
    torch.testing.assert_close(ours.detach(), right, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_labels(family: str, mode: str) -> None:
    right = json.loads((DATA / family / "labels.json").read_text())[mode]
    for method, labels in right.items():
        if isinstance(labels, str):
            assert (method, labels[:14]) == ("stack_neuron_results", "not available:")
            continue
        stack, ours = METHODS[method](run(family, mode), return_labels=True)
        assert ours == labels
        assert len(stack) == len(labels)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_circuits(family: str, mode: str) -> None:
    """OV and QK of the reference's own weights."""
    bridge, params = run(family, mode).model, entries(family, "param", mode)

    def stacked(name: str) -> Tensor:
        found = [
            params.get(f"blocks.{i}.attn.{name}", params.get(f"blocks.{i}.attn._{name}"))
            for i in range(2)
        ]
        weights = torch.stack(found)  # type: ignore[arg-type]
        return weights.repeat_interleave(bridge.cfg.n_heads // weights.shape[1], dim=1)

    right = {"OV": stacked("W_V") @ stacked("W_O"), "QK": stacked("W_Q") @ stacked("W_K").mT}
    for name, matrix in right.items():
        torch.testing.assert_close(getattr(bridge, name).AB.detach(), matrix, atol=2e-4, rtol=1e-3)
