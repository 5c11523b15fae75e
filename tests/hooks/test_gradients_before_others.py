"""Gradients at a module's input with a forward pre-hook of the user's: a function there that keeps
the values is a part of the model, and the gradient is that of the model's own tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from tests.conftest import tiny

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
POST, Z = "blocks.1.mlp.hook_post", "blocks.1.attn.hook_z"
PLACES = [(POST, "mlp.down_proj"), (Z, "self_attn.o_proj")]


class Stop(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Turn(torch.autograd.Function):
    """The identity, with its gradient times minus two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -2 * gradient


def bridge_with(path: str, change: Callable[[Tensor], Tensor | None]) -> TransformerBridge:
    """A bridge around a model with a forward pre-hook of the user's."""
    model = tiny("llama")

    def before(module: Any, args: Any) -> Any:
        new = change(args[0])
        return None if new is None else (new, *args[1:])

    model.model.layers[1].get_submodule(path).register_forward_pre_hook(before)
    return TransformerBridge(model)


def gradient_at(bridge: TransformerBridge, name: str, reads: bool = False) -> Tensor | None:
    """The gradient that a backward hook is shown; None if it is not called."""
    seen: list[Tensor] = []
    fwd = [(name, lambda x, hook: None)] if reads else []
    bwd = [(name, lambda gradient, hook: seen.append(gradient.clone()))]
    with bridge.hooks(fwd_hooks=fwd, bwd_hooks=bwd):
        bridge(TOKENS)[0, -1, 5].backward()
    bridge.zero_grad()
    assert len(seen) <= 1
    return seen[0] if seen else None


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("name", "path"), PLACES)
def test_a_stopped_gradient_is_zero(name: str, path: str, reads: bool) -> None:
    gradient = gradient_at(bridge_with(path, Stop.apply), name, reads)
    assert gradient is not None and not gradient.any()


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_a_detached_input_has_no_gradient(name: str, path: str) -> None:
    assert gradient_at(bridge_with(path, torch.Tensor.detach), name) is None


@pytest.mark.parametrize(("name", "path"), PLACES)
@pytest.mark.parametrize("change", [Stop.apply, torch.Tensor.detach])
def test_a_cache_has_zeros_where_the_gradient_is_stopped(
    name: str, path: str, change: Callable[[Tensor], Tensor]
) -> None:
    bridge = bridge_with(path, change)
    _, cache = bridge.run_with_cache(
        TOKENS, names_filter=name, incl_bwd=True, return_type="loss", return_cache_object=False
    )
    assert cache[name].any() and not cache[f"{name}_grad"].any()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("name", "path"), PLACES)
def test_a_turned_gradient_is_that_of_the_models_own_tensor(
    name: str, path: str, reads: bool
) -> None:
    plain = gradient_at(TransformerBridge(tiny("llama")), name)
    turned = gradient_at(bridge_with(path, Turn.apply), name, reads)
    assert plain is not None and turned is not None and plain.any()
    torch.testing.assert_close(turned, -2 * plain)


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_behind_a_function_that_changes_values_the_gradient_is_that_of_the_changed_one(
    name: str, path: str
) -> None:
    bridge = bridge_with(path, lambda x: x * 2)
    gradient = gradient_at(bridge, name)
    edit = torch.randn_like(bridge.run_with_cache(TOKENS)[1][name]) * 1e-3

    def logit(sign: int) -> Tensor:
        hooks = [(name, lambda x, hook: x + sign * edit)]
        return bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)[0, -1, 5]

    assert gradient is not None
    slope = (logit(1) - logit(-1)) / 2
    torch.testing.assert_close((gradient * edit).sum(), slope.detach(), rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize(
    "change", [lambda x: None, lambda x: x, lambda x: x.clone(), lambda x: x.mul_(1), Stop.apply]
)
@pytest.mark.parametrize(("name", "path"), PLACES)
def test_edits_come_after_the_hooks_of_others(
    name: str, path: str, change: Callable[[Tensor], Tensor | None]
) -> None:
    plain = TransformerBridge(tiny("llama"))
    hooks = {
        "fwd_hooks": [(name, lambda x, hook: x * 0.5)],
        "bwd_hooks": [(name, lambda g, hook: g)],
    }
    other = bridge_with(path, change)
    with plain.hooks(**hooks), other.hooks(**hooks):
        torch.testing.assert_close(other(TOKENS), plain(TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize("change", [lambda x: None, lambda x: x, lambda x: x.clone()])
@pytest.mark.parametrize(("name", "path"), PLACES)
def test_hooks_that_change_nothing_change_no_gradient(
    name: str, path: str, change: Callable[[Tensor], Tensor | None]
) -> None:
    plain = gradient_at(TransformerBridge(tiny("llama")), name)
    other = gradient_at(bridge_with(path, change), name)
    assert plain is not None and other is not None and torch.equal(plain, other)


def test_a_hook_that_writes_in_place_changes_the_value_that_is_shown() -> None:
    doubled = gradient_at(bridge_with("mlp.down_proj", lambda x: x * 2), POST)
    written = gradient_at(bridge_with("mlp.down_proj", lambda x: x.mul_(2)), POST)
    assert doubled is not None and written is not None
    torch.testing.assert_close(written, doubled)


@pytest.mark.parametrize("fn", [torch.Tensor.detach, Turn.apply, lambda x: x * 1])
def test_behind_an_edit_the_gradient_is_that_of_the_edit(fn: Callable[[Tensor], Tensor]) -> None:
    """Whether somebody else's hook stands before it or not."""
    gradients = []
    for bridge in (TransformerBridge(tiny("llama")), bridge_with("mlp.down_proj", Stop.apply)):
        seen: list[Tensor] = []
        hooks = [(POST, lambda gradient, hook, seen=seen: seen.append(gradient.clone()))]
        with bridge.hooks(fwd_hooks=[(POST, lambda x, hook: fn(x))], bwd_hooks=hooks):
            bridge(TOKENS)[0, -1, 5].backward()
        gradients += seen
    plain, other = gradients
    assert plain.any() and torch.equal(plain, other)


def test_a_graph_that_begins_in_the_hook_of_another_has_its_gradient() -> None:
    plain = gradient_at(TransformerBridge(tiny("llama")), POST)
    begun = gradient_at(
        bridge_with("mlp.down_proj", lambda x: x.detach().requires_grad_() * 1), POST
    )
    assert plain is not None and begun is not None and torch.equal(plain, begun)


def test_frozen_weights_have_the_gradient_of_an_edit() -> None:
    plain = gradient_at(TransformerBridge(tiny("llama")), POST)
    bridge = bridge_with("mlp.down_proj", Stop.apply)
    bridge.original_model.requires_grad_(False)
    frozen = gradient_at(bridge, POST)
    assert plain is not None and frozen is not None and torch.equal(plain, frozen)


def test_a_returned_gradient_replaces_that_of_the_models_own_tensor() -> None:
    bridge = bridge_with("mlp.down_proj", Turn.apply)
    seen: list[Tensor] = []
    hooks = [
        (POST, lambda gradient, hook: torch.ones_like(gradient)),
        ("blocks.1.mlp.hook_pre_linear", lambda gradient, hook: seen.append(gradient.clone())),
    ]
    with bridge.hooks(bwd_hooks=hooks):
        _, cache = bridge.run_with_cache(TOKENS)
        bridge(TOKENS)[0, -1, 5].backward()
    act = torch.nn.functional.silu(cache["blocks.1.mlp.hook_pre"])
    torch.testing.assert_close(seen[0], act)


def test_no_torch_hook_is_left() -> None:
    bridge = bridge_with("mlp.down_proj", Stop.apply)
    module = bridge.original_model.model.layers[1].mlp.down_proj
    before = list(module._forward_pre_hooks.items())
    gradient_at(bridge, POST)
    bridge.run_with_cache(TOKENS, incl_bwd=True, return_type="loss")
    assert list(module._forward_pre_hooks.items()) == before
