"""What a tensor is made of, read off autograd's graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from adapters.observe.operations import (
    behind,
    between,
    clamp_before,
    factor,
    not_followed,
    parameter,
    selected_from,
)
from adapters.views import Affine
from adapters.views.views import constant_of
from bridge import TransformerBridge
from tests.tiny_models import tiny_model

X = torch.arange(6.0).reshape(2, 3).requires_grad_()


class Rounded(torch.autograd.Function):
    """A function whose inside autograd does not record."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


@pytest.mark.parametrize("constant", [0.25, math.sqrt(2), 1 / 3, 12.0])
def test_factors_are_read_and_not_fitted(constant: float) -> None:
    start = (X * 1.0).clone()
    for made, right in ((start * constant, constant), (start / constant, 1 / constant)):
        product = factor(made.grad_fn, {})
        assert product is not None
        assert constant_of(product[1]) == float(f"{right:.8g}")
        assert behind(product[0]) is behind(start.grad_fn)


def test_a_factor_that_is_a_parameter_has_its_name() -> None:
    gain = nn.Parameter(torch.ones(3))
    product = factor((X * gain).grad_fn, {gain.data_ptr(): "gain"})
    assert product is not None and product[1] == (Affine(weight="gain"),)
    assert parameter((gain.view(1, 3) + X).grad_fn.next_functions[0][0], {gain.data_ptr(): "gain"})
    assert factor((X * X.exp()).grad_fn, {}) is None, "two tensors of the run are no factor"


def test_a_soft_cap_is_read_with_its_factor() -> None:
    start = X.clone()
    seen = between((30.0 * torch.tanh(start * 0.5 / 30.0)).grad_fn, behind(start.grad_fn))
    assert seen.cap == pytest.approx(30.0) and seen.factor == pytest.approx(0.5)
    assert not seen.adds and seen.start is behind(start.grad_fn)


def test_selected_columns_and_their_clamp_lead_to_their_tensor() -> None:
    start = X * 1.0
    columns = start.clamp(-2.0, 2.0).split(1, dim=-1)[1].transpose(0, 1)
    assert selected_from(columns.grad_fn) is start.grad_fn
    assert clamp_before((columns * 3 + 1).grad_fn, {start.grad_fn}) == 2.0
    assert clamp_before(columns.clamp(min=0.0).grad_fn, {columns.grad_fn}) is None
    assert selected_from((columns * 3).grad_fn) is not start.grad_fn


def test_what_autograd_does_not_record_is_named() -> None:
    start = X.clone()
    assert not_followed((start * 2 + 1).grad_fn, start.grad_fn) is None
    assert not_followed(Rounded.apply(start * 2).grad_fn, start.grad_fn) == (
        "the autograd function Rounded"
    )
    assert not_followed(None, start.grad_fn) == "code outside of autograd's graph"


def test_blocks_outside_of_the_graph_are_refused_by_name() -> None:
    """Reformer's blocks run inside of one custom function, without a graph."""
    bridge = TransformerBridge(tiny_model("reformer"), cache_declaration=False)
    assert not bridge.architecture.stack.block.steps
    assert (
        "whose graph cannot be followed" in bridge.offered().not_offered["blocks.0.hook_resid_mid"]
    )
