"""What is attached to a hook point, and what a user's function may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from adapters.views import View
from bridge.hooks.context import CURRENT, RunContext, Scope, in_context

if TYPE_CHECKING:
    from bridge.hooks.hook_point import HookPoint

#: ``fn(activation, hook=point)`` returns the new activation, or None to leave it (or what was done to it in place).
HookFunction = Callable[..., Tensor | None]
#: ``fwd`` and ``bwd`` are functions of the user; ``read`` only looks at the activation; ``edge`` is given the
#: activation that later computation uses, to ask for its gradient; ``follow`` is our own: it is shown the activation
#: itself, may put another in its place, and stays where hooks are reset.
Kind = Literal["fwd", "bwd", "read", "edge", "follow"]


class Listener:
    """Something attached to a hook point.

    Args:
        kind: see `Kind`.
        fn: called as ``fn(activation, hook=point)``.
        scope: the scope that it belongs to; None: every run sees it.
        permanent, level: what `reset_hooks` asks for.
        named: its hook point was chosen by name, not by a filter.
        deferrable: of a ``read``: it takes a `Deferred` in place of an activation that would have to be computed.

    Attributes:
        in_run: the function is a part of the run: hooks and caches see what it computes with the model. It says so by
            an attribute of this name.
    """

    __slots__ = ("deferrable", "fn", "in_run", "kind", "level", "named", "permanent", "scope")

    def __init__(
        self,
        kind: Kind,
        fn: Callable[..., Any],
        scope: Scope | None = None,
        permanent: bool = False,
        level: int | None = None,
        deferrable: bool = False,
        named: bool = False,
    ) -> None:
        self.in_run, self.named = getattr(fn, "in_run", False) is True, named
        self.kind, self.fn, self.scope = kind, fn, scope
        self.permanent, self.level, self.deferrable = permanent, level, deferrable

    def visible(self, context: RunContext) -> bool:
        """Whether the code in this context sees it."""
        return self.scope in context.visible


@runtime_checkable
class FitsPoints(Protocol):
    """A hook function that knows which hook points it fits."""

    def check_point(self, hook: HookPoint) -> None:
        """Raises a `ValueError` for one that it does not fit."""


class AttachesListeners(Protocol):
    """What attaches listeners to hook points, and detaches them."""

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attaches a listener."""

    def remove(self, point: HookPoint, gone: tuple[Listener, ...]) -> None:
        """Removes listeners."""


class Handle:
    """Takes back what one `add_hook` added.

    Attributes:
        hook: the hook point.
    """

    def __init__(self, hook: HookPoint, listener: Listener, attaches: AttachesListeners) -> None:
        self.hook, self._listener, self._attaches = hook, listener, attaches

    @property
    def is_permanent(self) -> bool:
        """Whether only `reset_hooks` with ``including_permanent=True`` removes it."""
        return self._listener.permanent

    @property
    def context_level(self) -> int | None:
        """The level that it was added at."""
        return self._listener.level

    def remove(self) -> None:
        """Removes the hook. Doing it twice does nothing."""
        self._attaches.remove(self.hook, (self._listener,))

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def call_user_function(listener: Listener, given: Tensor, point: HookPoint) -> Any:
    """Calls a user's function, outside of the run: what it computes is not the model's."""
    context = CURRENT.get()
    if not listener.in_run:
        CURRENT.set(context.outside_the_run())
    try:
        return listener.fn(given, hook=point)
    except TypeError as error:
        if _takes_hook(listener.fn):
            raise
        name = getattr(listener.fn, "__name__", None) or repr(listener.fn)
        raise TypeError(
            f"the hook {name} at {point.name} takes {inspect.signature(listener.fn)}, but it is called as "
            "fn(activation, hook=point): give it a second parameter named `hook`"
        ) from error
    finally:
        CURRENT.set(context)


def checked_function(hook: HookPoint, fn: HookFunction) -> HookFunction:
    """A function that can be a hook; one that knows which hook points it fits (`check_point`) is asked.

    Raises:
        TypeError: it cannot be called.
        ValueError: it does not fit this hook point.
    """
    if not callable(fn):
        raise TypeError(f"the hook for {hook.name} is {fn!r}, which cannot be called")
    if isinstance(fn, FitsPoints):
        fn.check_point(hook)
    return fn


def _takes_hook(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with an activation and ``hook=``; True where that cannot be known."""
    try:
        inspect.signature(fn).bind(None, hook=None)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def checked(new: Any, old: Tensor, listener: Listener, point: HookPoint) -> Tensor:
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


def in_its_place(given: Tensor, version: int | None, act: Tensor, view: View) -> Tensor | None:
    """A copy of an activation that somebody was shown, where it is to take the activation's place; or else None.

    Args:
        given: the copy.
        version: of it, before it was shown.
        act: the activation.
        view: how the hook point sees it.
    """
    if changed_in_place(given, version):
        return given
    if given.requires_grad:
        # The copy is what later computation uses, so that its gradient is the gradient here. Where writing back
        # would compute something anew, only if the function asked for that gradient.
        return given if not view.contextual or given.retains_grad or given._backward_hooks else None
    if view.identity:
        return given  # as good as the activation, and a change through `.data`, which is not counted, is in it
    return None if view.contextual or (given.is_cpu and torch.equal(given, act)) else given


def version_of(x: Tensor) -> int | None:
    """How often a tensor was written to; None for one of inference mode, which does not count."""
    return None if x.is_inference() else x._version


def listen_backward(listener: Listener, seen: Tensor, point: HookPoint) -> None:
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
            new = call_user_function(listener, given, point)
        if isinstance(new, tuple) and len(new) == 1:  # as torch's own backward hooks may return it
            (new,) = new
        if new is None:
            return given if changed_in_place(given, version) else None
        return checked(new, gradient, listener, point)

    seen.register_hook(on_gradient)


def wants_gradients(listeners: list[Listener]) -> bool:
    """Whether any of them is shown gradients in this run."""
    return torch.is_grad_enabled() and any(listener.kind in ("bwd", "edge") for listener in listeners)
