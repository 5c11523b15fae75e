"""What the functions at one hook point are shown in one pass: copies that are at one place in the graph."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks


class _SavedTensor(torch.autograd.Function):
    """A node that keeps a tensor, as others do for backward: what it gives back has the tensor's own edge."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def _same(x: Tensor) -> Tensor:
    return x


def copy_at_same_edge(x: Tensor) -> Tensor:
    """A copy that stands in the graph where the tensor itself does: a gradient that reaches one reaches the other.

    So two functions can hold one activation, as in HookedTransformer, and what one writes into it the other does not
    see. What a node has saved for backward is given back with the edge that it was saved with, whatever the hooks of
    saved tensors make of its values: here a copy.

    Args:
        x: requires a gradient, and is no leaf.
    """
    with saved_tensors_hooks(_copy, _same):
        node = _SavedTensor.apply(x).grad_fn
    return node.saved_tensors[0]


def copy_to_show(act: Tensor, shown: list[Tensor], one_tensor: bool) -> Tensor:
    """What one function is shown of an activation.

    Args:
        act: the activation, as the functions before have left it.
        shown: what they were shown. Nobody has been shown the site's own tensor: its copy is a place of its own.
        one_tensor: show what the one before was shown, where gradients are computed.
    """
    if shown and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if one_tensor and any(act is x for x in shown):
            return act
        if act.requires_grad and not act.is_leaf:
            return copy_at_same_edge(act)
    return act.clone()


def keep_gradients_of_all(given: Tensor, shown: list[Tensor]) -> None:
    """Goes on filling `grad` of what has asked for it, where another tensor at its place asks: torch fills the last's.

    Args:
        given: what a function has just been shown.
        shown: what those before it were shown.
    """
    if not shown or torch.compiler.is_compiling() or not given.retains_grad:
        return
    before = [x for x in shown if x.retains_grad and x.grad_fn is given.grad_fn and x is not given]
    if not before:
        return
    held = weakref.ref(before[-1])

    def keep(gradient: Tensor) -> None:
        x = held()
        if x is not None:
            x.grad = gradient.clone() if x.grad is None else x.grad + gradient

    given.register_hook(keep)
