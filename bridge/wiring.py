"""Where hook points meet torch: one torch hook for each site that someone listens to, and none for the others."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adapters.points import Follower, Point, Site
from adapters.views import Call
from bridge.attention_tap import ForwardTap, InterfaceTap
from bridge.hook_point import STATE, Handle, HookPoint, Listener


@functools.lru_cache(maxsize=None)
def first_parameter(forward: Callable[..., Any]) -> str:
    """The name of a forward function's first parameter after self."""
    return list(inspect.signature(forward).parameters)[1]


class SiteHook:
    """The torch hook on one site.

    Attributes:
        points: the hook points that have listeners here, in the order of their declaration.
        watchers: how many points elsewhere need the tensor seen here.
    """

    __slots__ = ("handle", "points", "site", "watchers")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.points: tuple[HookPoint, ...] = ()
        self.watchers = 0
        self.handle: Any = None

    def attach(self, module: nn.Module) -> None:
        if self.site.kind == "input":
            self.handle = module.register_forward_pre_hook(self.on_input, with_kwargs=True)
        else:
            self.handle = module.register_forward_hook(self.on_output, with_kwargs=True)

    def detach(self) -> None:
        self.handle.remove()
        STATE.sources.pop(self, None)

    # A copy of a model that has hooks attached carries inert ones: hooks belong to one bridge.
    def __reduce__(self) -> tuple[Any, ...]:
        return SiteHook, (self.site,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteHook:
        return SiteHook(self.site)

    def see(self, x: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Runs the points in turn, and keeps the tensor for those who need it elsewhere."""
        readers = self._separate_readers()
        if readers:
            # In the order of HookedTransformer, so that gradients arrive in its order too.
            branches = {reader: fire_all(self.points, x.view_as(x), module, args, kwargs) for reader in readers}
            STATE.branched.update(branches)
            x = branches[readers[0]]
        else:
            x = fire_all(self.points, x, module, args, kwargs)
        if self.watchers:
            STATE.sources[self] = (module, x)
        return x

    def _separate_readers(self) -> tuple[str, ...]:
        """The points that read this site one by one, when someone asks for gradients here."""
        if not torch.is_grad_enabled():
            return ()
        owner = STATE.owner
        for point in self.points:
            if point.point.branches:
                for listener in point.listeners:
                    if listener.kind in ("bwd", "edge") and listener.owner is owner:
                        return point.point.branches
        return ()

    # `kwargs` may be missing in both: another thread may be registering this very hook while a forward pass runs.
    def on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = None if args else first_parameter(type(module).forward)
        x = args[0] if name is None else kwargs[name]
        new = self.see(x, module, args, kwargs)
        if new is x:
            return None
        return ((new, *args[1:]), kwargs) if name is None else (args, kwargs | {name: new})

    def on_output(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        if isinstance(output, Tensor):
            new = self.see(output, module, args, kwargs)
            return None if new is output else new
        index = int(self.site.key or 0)
        x = output[index]
        new = self.see(x, module, args, kwargs)
        return None if new is x else type(output)((*output[:index], new, *output[index + 1 :]))


def fire_all(
    points: Iterable[HookPoint], x: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Runs the hook points of one site on the tensor there."""
    call: Call | None = None
    start = STATE.start_at
    for point in points:
        if start is not None and point.point.depth < start:
            continue  # before the layer that this run starts at
        if call is None:
            call = Call(module, args, kwargs)
        if point.sources:
            call.sources = tuple(STATE.sources[source] for source in point.sources)
        x = point.fire(x, call)
    return x


class Wiring:
    """All hook points of one model, and the torch hooks that serve them.

    Args:
        model: the Hugging Face model.
        points: what its adapter declares.
    """

    def __init__(self, model: nn.Module, points: Iterable[Point]) -> None:
        self.model = model
        self.points: dict[str, HookPoint] = {
            point.name: HookPoint(point, order, self) for order, point in enumerate(points)
        }
        self._hooks: dict[Site, SiteHook] = {}
        self._taps: dict[str, InterfaceTap | ForwardTap] = {}
        self._following: dict[tuple[HookPoint, object], list[Handle]] = {}
        self._lock = threading.RLock()

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> Handle:
        """Attaches a listener, and the torch hook it needs if nobody needed it yet."""
        with self._lock:
            if not point.listeners:
                self._connect(point)
            point.listeners = (listener, *point.listeners) if prepend else (*point.listeners, listener)
            if point.point.followers and listener.kind != "read":
                self._follow(point, listener.owner)
            if point.point.branches and listener.kind in ("bwd", "edge"):
                self._branch(point, listener.owner)
        return Handle(point, listener)

    def drop(self, point: HookPoint, which: Callable[[Listener], bool]) -> None:
        """Removes the listeners that `which` chooses, and the torch hook if nobody is left."""
        with self._lock:
            gone = {listener for listener in point.listeners if which(listener)}
            if not gone:
                return
            left = tuple(listener for listener in point.listeners if listener not in gone)
            point.listeners = left
            for owner in {listener.owner for listener in gone}:
                kinds = ("bwd", "edge") if point.point.branches else ("fwd", "bwd", "edge")
                if not any(listener.owner is owner and listener.kind in kinds for listener in left):
                    for handle in self._following.pop((point, owner), ()):
                        handle.remove()
            if not left:
                self._disconnect(point)

    def _connect(self, point: HookPoint) -> None:
        site = point.point.site
        if site.kind in ("interface", "forward"):
            tap = self._taps.get(site.path)
            if tap is None:
                tap_class = InterfaceTap if site.kind == "interface" else ForwardTap
                tap = self._taps[site.path] = tap_class(self.model.get_submodule(site.path))
            tap.connect(str(site.key), point)
        else:
            hook = self._hook(site)
            hook.points = tuple(sorted((*hook.points, point), key=lambda p: p.order))
        point.sources = tuple(self._hook(source) for source in point.point.sources)
        for hook in point.sources:
            hook.watchers += 1

    def _disconnect(self, point: HookPoint) -> None:
        site = point.point.site
        if site.kind in ("interface", "forward"):
            tap = self._taps[site.path]
            if tap.disconnect(str(site.key), point):
                del self._taps[site.path]
        else:
            hook = self._hooks[site]
            hook.points = tuple(p for p in hook.points if p is not point)
            self._release(hook)
        for hook in point.sources:
            hook.watchers -= 1
            self._release(hook)
        point.sources = ()

    def _hook(self, site: Site) -> SiteHook:
        hook = self._hooks.get(site)
        if hook is None:
            hook = SiteHook(site)
            hook.attach(self.model.get_submodule(site.path))
            self._hooks[site] = hook
        return hook

    def _release(self, hook: SiteHook) -> None:
        if not hook.points and not hook.watchers:
            hook.detach()
            del self._hooks[hook.site]

    def _follow(self, point: HookPoint, owner: object) -> None:
        """Lets the followers of a point take over what a run of this thread writes there."""
        if (point, owner) in self._following:
            return
        handles = self._following[point, owner] = []
        for follower in point.point.followers:

            def take_over(value: Tensor, hook: HookPoint, follower: Follower = follower) -> Tensor | None:
                written = STATE.followed.get(point)
                return None if written is None else follower.convert(written)

            handles.append(self.add(self.points[follower.name], Listener("fwd", take_over, owner), prepend=True))

    def _branch(self, point: HookPoint, owner: object) -> None:
        """Lets each separate reader of a point compute from its own copy of what stands there."""
        if (point, owner) in self._following:
            return
        handles = self._following[point, owner] = []
        for name in point.point.branches:

            def take_over(value: Tensor, hook: HookPoint) -> Tensor | None:
                entered = STATE.branched.pop(hook.name, None)
                if entered is None:
                    return None
                module = self.model.get_submodule(hook.point.site.path)
                call = Call(module, (entered,), {})
                return hook.view.get(module.forward(entered), call)

            handles.append(self.add(self.points[name], Listener("fwd", take_over, owner), prepend=True))
