"""What a user's function made of an activation, and whether it can take the activation's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.views import View
from bridge.hooks.context import CURRENT, NamedPoint, in_context
from bridge.hooks.listener import Listener

#: Calls what makes something of a gradient, and compares that over processes.
Compared = Callable[[Callable[[], Any], Tensor], Any]


def checked(new: Any, old: Tensor, listener: Listener, point: NamedPoint) -> Tensor:
    """What a user's function returned, if it can take the place of the activation.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape, or is on another device.
        TypeError: it is of whole numbers where the activation is not, or the reverse.
    """
    if isinstance(new, Tensor) and new.shape == old.shape and new.device == old.device and new.dtype == old.dtype:
        return new
    name = getattr(listener.fn, "__name__", None) or repr(listener.fn)
    hook, what = ("hook", "activation") if listener.kind in ("fwd", "follow") else ("backward hook", "gradient")
    if not isinstance(new, Tensor):
        raise TypeError(
            f"the {hook} {name} at {point.name} returned {type(new).__name__}; it must return a tensor or None"
        )
    if new.shape != old.shape:
        raise ValueError(
            f"the {hook} {name} at {point.name} returned shape {list(new.shape)}; "
            f"the {what} has shape {list(old.shape)} ({point.point.axes})"
        )
    if new.device != old.device:
        raise ValueError(
            f"the {hook} {name} at {point.name} returned a tensor on {new.device}; the {what} is on {old.device}"
        )
    if _kind_of_number(new) != _kind_of_number(old):
        raise TypeError(
            f"the {hook} {name} at {point.name} returned {new.dtype}; the {what} is {old.dtype}. "
            f"If that is meant, return .to({old.dtype}) of it"
        )
    return new.to(old.dtype)


def _kind_of_number(x: Tensor) -> str:
    """Between numbers of one kind a conversion loses digits at most."""
    if x.dtype == torch.bool:
        return "truth"
    return "complex" if x.is_complex() else "float" if x.is_floating_point() else "integer"


def changed_in_place(given: Tensor, version: int | None) -> bool:
    """Whether a tensor was written to since it had this version (None: it does not count its versions)."""
    return version is None or given._version != version


def replaces_activation(given: Tensor, version: int | None, act: Tensor, view: View, held: bool) -> bool:
    """Whether a copy of an activation that somebody was shown is to take the activation's place.

    Args:
        given: the copy.
        version: of it, before it was shown.
        act: the activation.
        view: how the hook point sees it.
        held: somebody may still hold the copy.
    """
    if torch.compiler.is_compiling() and not view.contextual:
        return True  # compiled code cannot ask for values or versions, and has no hooks of gradients
    if changed_in_place(given, version):
        return True
    if torch.compiler.is_compiling():
        return False
    if given.requires_grad and (held or not view.contextual or given.retains_grad or given._backward_hooks):
        # The copy is what later computation uses, so that its gradient is the gradient here. Where writing back
        # would compute something anew, only if somebody can ask for that gradient.
        return True
    if view.identity:
        return True  # as good as the activation, and a change through `.data`, which is not counted, is in it
    return not (view.contextual or (given.is_cpu and torch.equal(given, act)))


def version_of(x: Tensor) -> int | None:
    """How often a tensor was written to; None for one of inference mode, which does not count."""
    # torch.compile knows nothing of inference mode.
    return x._version if torch.compiler.is_compiling() or not x.is_inference() else None


def listen_backward(listener: Listener, seen: Tensor, point: NamedPoint, compared: Compared) -> None:
    """Shows the gradient of an activation to a listener when there is one.

    Autograd may call it on a thread of its own, where nothing of the caller's context is known: the scopes that are
    open now are those that the function sees.
    """
    if listener.kind == "edge":
        listener.fn(seen, hook=point)
        return
    if not seen.requires_grad:
        return
    context = CURRENT.get().outside_the_run()

    def on_gradient(gradient: Tensor) -> Tensor | None:
        given = gradient.clone()  # autograd may hand the same tensor to others
        version = version_of(given)
        with in_context(context):
            new = compared(lambda: context.call_user_function(listener, given, point), given)
        if isinstance(new, tuple) and len(new) == 1:  # as torch's own backward hooks may return it
            (new,) = new
        if new is None:
            return given if changed_in_place(given, version) else None
        return checked(new, gradient, listener, point)

    seen.register_hook(on_gradient)


def wants_gradients(listeners: list[Listener]) -> bool:
    """Whether any of them is shown gradients in this run."""
    return torch.is_grad_enabled() and any(listener.kind in ("bwd", "edge") for listener in listeners)
