"""`HookPoint`: the bridge's hook point as a torch module, for a model's own places and for modules that users write."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from adapters.points import Point, Site
from adapters.views import Call, View
from bridge.hooks import hook_point as bridge_point
from bridge.hooks.listener import AttachesListeners, Handle, Listener

#: ``fn(activation, hook=point)`` returns the new activation, or None.
HookFunction = Callable[..., Any]

#: For parts and hook points in whose place a user's module is being called: what the old one does there.
CALLS: ContextVar[dict[nn.Module, Callable[..., Any] | None]] = ContextVar("legacy_calls", default={})  # noqa: B039


class LensHandle(NamedTuple):
    """One hook at a hook point: `hook` removes it."""

    hook: Handle
    is_permanent: bool = False
    context_level: int | None = None

    def remove(self) -> None:
        """Removes the hook."""
        self.hook.remove()


class Loose:
    """Attaches listeners to a hook point that belongs to no model: calling it is what runs them."""

    def add(self, point: bridge_point.HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attaches a listener."""
        point.set_listeners((listener, *point.listeners) if prepend else (*point.listeners, listener))

    def remove(self, point: bridge_point.HookPoint, gone: tuple[Listener, ...]) -> None:
        """Removes listeners."""
        point.set_listeners(tuple(listener for listener in point.listeners if listener not in gone))


def point_named(name: str, depth: int = -1, stacks: Collection[str] | None = None) -> Point:
    """A place in a module of the user's.

    Args:
        name: its name; one such as ``blocks.3.mlp.hook_post`` says its layer.
        depth: the layer, where the name does not say it.
        stacks: what names of layers begin with; None: whatever stands before a number.
    """
    stack, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    inside = index.isdigit() and (stacks is None or stack in stacks)
    return Point(name, Site(name, "output"), View(), "...", int(index) if inside else depth, stack=stack * inside)


class HookPoint(bridge_point.HookPoint, nn.Module):
    """An identity module at which an activation can be read and changed.

    One that a user makes runs its hooks when it is called. Those of a model are called by the model itself.

    Attributes:
        name: its name in the root module, set by `HookedRootModule.setup`.
        ctx: a dictionary for hook functions to keep state in.

    Example:
        >>> import torch
        >>> from bridge.legacy.hook_points import HookPoint
        >>> point = HookPoint()
        >>> handle = point.add_hook(lambda x, hook: x * 2)
        >>> point(torch.ones(2))
        tensor([2., 2.])
    """

    __call__ = nn.Module.__call__

    def __init__(self, point: Point | None = None, order: int = 0, attaches: AttachesListeners | None = None) -> None:
        nn.Module.__init__(self)
        super().__init__(point or point_named(""), order, attaches or Loose())
        self.is_loose = point is None
        if point is None:
            self.name = None  # type: ignore[assignment]  # until `setup` gives it one

    def forward(self, x: Tensor) -> Tensor:
        """What the hooks make of a tensor. Where the model runs them itself, the same tensor."""
        return x if self in CALLS.get() else self._path(self, x, Call(nn.Identity(), (x,), {}), False, View())

    def apply(self, x: Any, call: Call | None = None, copy: bool = False) -> Any:  # type: ignore[override]
        """As for `bridge.HookPoint.apply`; or, with a function, as for `torch.nn.Module.apply`."""
        return super().apply(x, call, copy) if call is not None else nn.Module.apply(self, x)

    def register_forward_hook(self, hook: Callable[..., Any], *, prepend: bool = False, **kwargs: Any) -> Any:
        """Adds a function of torch's kind, called as ``hook(point, (activation,), activation)``."""
        if any(kwargs.values()):
            raise TypeError(f"a hook point is called with one tensor: {', '.join(kwargs)} has no meaning for it")
        theirs = hook
        return self.add_hook(lambda x, hook: theirs(hook, (x,), x), prepend=prepend)

    @property
    def fwd_hooks(self) -> list[LensHandle]:  # type: ignore[override]
        """The functions that were added to it."""
        return [LensHandle(hook, hook.is_permanent, hook.context_level) for hook in super().fwd_hooks]

    @property
    def bwd_hooks(self) -> list[LensHandle]:  # type: ignore[override]
        """The functions of gradients that were added to it."""
        return [LensHandle(hook, hook.is_permanent, hook.context_level) for hook in super().bwd_hooks]

    def leave(self) -> tuple[Listener, ...]:
        """Takes its hooks away, and makes it belong to nobody. Gives the hooks."""
        hooks = self.listeners
        self._attaches.remove(self, hooks)
        self._attaches = Loose()
        return hooks

    def join(self, attaches: AttachesListeners, hooks: tuple[Listener, ...]) -> None:
        """Makes it belong to a model, whose runs see its hooks."""
        self._attaches = attaches
        for listener in hooks:
            attaches.add(self, listener)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"name": self.name, "ctx": self.ctx, "is_loose": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has no hooks, and belongs to no model until that model's `setup`."""
        HookPoint.__init__(self)
        self.__dict__.update({name: value for name, value in state.items() if name not in ("name", "ctx")})
        self.name, self.ctx = state["name"], state["ctx"]
