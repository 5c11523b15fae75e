"""Where hook points meet torch: one torch hook for each site that someone listens to, and none for the others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adapters.points import Follower, Point, Site
from adapters.views import Branch, Call
from bridge.hooks.hook_point import STATE, Handle, HookPoint, Listener
from bridge.hooks.modules import Finder, first_parameter
from bridge.taps.attention import Tap, untap
from bridge.taps.experts import TAPS, tap_on

#: For views that do not look at the call.
_NO_CALL = Call(nn.Identity(), (), {})


class SiteHook:
    """The torch hook on one site.

    Attributes:
        points: the hook points that have listeners here, in the order of their declaration.
        watchers: how many points elsewhere need the tensor seen here.
        readers: the hook points behind this site that may be given a copy of their own (see `Point.branches`).
    """

    __slots__ = ("find", "handle", "points", "readers", "site", "watchers")

    def __init__(self, site: Site, find: Finder | None = None) -> None:
        self.site = site
        self.find = find
        self.points: tuple[HookPoint, ...] = ()
        self.watchers = 0
        self.readers: tuple[HookPoint, ...] = ()
        self.handle: Any = None

    def update(self) -> None:
        """Attaches or detaches the torch hook, as it is needed now."""
        if not (self.points or self.watchers or self.readers):
            self.handle.remove()
            self.handle = None
            STATE.sources.pop(self, None)
        elif self.handle is None:
            module = self.find.module  # type: ignore[union-attr]
            if self.site.kind == "input":
                self.handle = module.register_forward_pre_hook(self.on_input, with_kwargs=True)
            else:
                self.handle = module.register_forward_hook(self.on_output)

    # A copy of a model that has hooks attached carries inert ones: hooks belong to one bridge.
    def __reduce__(self) -> tuple[Any, ...]:
        return SiteHook, (self.site,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteHook:
        return SiteHook(self.site)

    def see(self, x: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Runs the points in turn, and keeps the tensor for those who need it elsewhere."""
        if not self.watchers and not self.readers and not torch.is_grad_enabled():
            return self._fire(x, module, args, kwargs)
        for reader in self.readers:
            x = self._own_copy(reader, x, module, args, kwargs)
        readers = self._separate_readers()
        if readers:
            # In the order of HookedTransformer, so that gradients arrive in its order too.
            branches = {reader: self._fire(x.view_as(x), module, args, kwargs) for reader in readers}
            STATE.branched.update(branches)
            x = branches[readers[0]]
        else:
            x = self._fire(x, module, args, kwargs)
        if self.watchers:
            STATE.sources[self] = (module, x)
        return x

    def _fire(self, x: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        call, start, owner, points = _NO_CALL, STATE.start_at, STATE.owner, self.points
        last = -1 if len(points) == 1 else self._last_writer()
        for index, point in enumerate(points):
            if start is not None and point.point.depth < start:
                continue  # before the layer that this run starts at
            if call is _NO_CALL and (point.view.contextual or point.sources):
                call = Call(module, args, kwargs)
            if point.sources:
                if all(listener.owner is not owner for listener in point.listeners):
                    continue  # attached by another thread, perhaps after this run had passed the sources
                call.sources = tuple([STATE.sources[source] for source in point.sources])
            reader = point.reader  # once: another thread may change it
            if reader is None:
                x = point.fire(x, call, shield=index < last)
            elif reader.owner is owner:
                point.look(reader, x, call, shield=index < last)
        return x

    def _last_writer(self) -> int:
        """The place of the last point here that this run writes through, or -1."""
        owner, last = STATE.owner, -1
        for index, point in enumerate(self.points):
            if (
                point.view.writes_through
                and point.reader is None
                and any(listener.owner is owner and listener.kind != "read" for listener in point.listeners)
            ):
                last = index
        return last

    def _own_copy(
        self, reader: HookPoint, x: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Gives a reader what it reads by itself: at its projection's input, or its part of a fused one's output."""
        entered = STATE.branched.pop(reader.name, None)
        if entered is None:
            return x
        if self.site.kind == "input":
            return entered
        call = Call(module, args, kwargs)
        return reader.view.put(x, reader.view.get(module.forward(entered), call), call)

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

    # `kwargs` may be missing: another thread may be registering this very hook while a forward pass runs.
    def on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = None if args else first_parameter(type(module).forward)
        x = args[0] if name is None else kwargs[name]
        new = self.see(x, module, args, kwargs)
        if new is x:
            return None
        return ((new, *args[1:]), kwargs) if name is None else (args, kwargs | {name: new})

    def on_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            new = self.see(output, module, args, {})
            return None if new is output else new
        index = int(self.site.key or 0)
        x = output[index]
        new = self.see(x, module, args, {})
        return None if new is x else type(output)((*output[:index], new, *output[index + 1 :]))


class Wiring:
    """All hook points of one model, and the torch hooks that serve them.

    Args:
        model: the Hugging Face model.
        points: what its adapter declares.
    """

    def __init__(self, model: nn.Module, points: Iterable[Point]) -> None:
        self.model = model
        self.points: dict[str, HookPoint] = {}
        self.lock = threading.RLock()
        self._sites: dict[Site, SiteHook] = {}
        self._taps: dict[HookPoint, Tap] = {}
        self._following: dict[tuple[HookPoint, object], list[Any]] = {}
        self._connected = 0
        self._blocks: dict[tuple[str, int], list[HookPoint]] = {}
        for order, point in enumerate(points):
            self.points[point.name] = HookPoint(point, order, self)
            self.settle(self.points[point.name])

    def settle(self, hook: HookPoint) -> None:
        """Finds the sites of a hook point, as its `point` says."""
        point = hook.point
        hook.home = None if point.site.kind in TAPS else self._site(point.site)
        hook.sources = tuple([self._site(source) for source in point.sources])

    @property
    def listening(self) -> bool:
        """Whether anyone listens to anything."""
        return self._connected > 0

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> Handle:
        """Attaches a listener, and the torch hook it needs if nobody needed it yet.

        Raises:
            ValueError: see `_check`; nothing is attached then.
        """
        with self.lock:
            if listener.kind != "read":
                self._check(point, listener)
            if not point.listeners:
                self._connect(point)
            point.set_listeners((listener, *point.listeners) if prepend else (*point.listeners, listener))
            if listener.kind != "read":
                self._lead(point, listener)
        return Handle(point, listener)

    def remove(self, point: HookPoint, gone: Iterable[Listener]) -> None:
        """Removes listeners, and the torch hook if nobody is left. Those that are not there are ignored."""
        with self.lock:
            before = point.listeners
            left = tuple(listener for listener in before if listener not in gone)
            if len(left) == len(before):
                return
            point.set_listeners(left)
            if self._following:
                self._stop_leading(point, left)
            if not left:
                self._disconnect(point)

    def listen(self, points: Iterable[HookPoint], listeners: Sequence[Listener]) -> None:
        """Attaches the same listeners to many points (see `add`)."""
        alone = listeners[0] if len(listeners) == 1 and listeners[0].kind == "read" else None
        with self.lock:
            for point in points:
                if alone is not None and not point.listeners:  # a cache, which leads to nothing else
                    self._connect(point)
                    point.set_listeners((alone,))
                    continue
                for listener in listeners:
                    self.add(point, listener)

    def forget(self, points: Iterable[HookPoint], listeners: Sequence[Listener]) -> None:
        """Removes what `listen` attached."""
        with self.lock:
            for point in points:
                if point.reader is listeners[0]:
                    point.set_listeners(())
                    self._disconnect(point)
                else:
                    self.remove(point, listeners)

    def _connect(self, point: HookPoint) -> None:
        home = point.home
        if home is None:
            site = point.point.site
            tap = tap_on(site.kind, Finder(self.model, site.path).module)
            self._taps[point] = tap
            tap.connect(str(site.key), point)
        else:
            others = home.points
            if not others:
                home.points = (point,)
            elif others[-1].order < point.order:
                home.points = (*others, point)
            else:
                home.points = tuple(sorted((*others, point), key=lambda p: p.order))
            if home.handle is None:
                home.update()
        for source in point.sources:
            source.watchers += 1
            source.update()
        self._connected += 1

    def _disconnect(self, point: HookPoint) -> None:
        self._connected -= 1
        home = point.home
        if home is None:
            self._taps.pop(point).disconnect(str(point.point.site.key), point)
        else:
            home.points = tuple(p for p in home.points if p is not point) if len(home.points) > 1 else ()
            if not home.points:
                home.update()
        for source in point.sources:
            source.watchers -= 1
            source.update()

    def _site(self, site: Site) -> SiteHook:
        hook = self._sites.get(site)
        if hook is None:
            hook = self._sites[site] = SiteHook(site, Finder(self.model, site.path))
        return hook

    def _lead(self, point: HookPoint, listener: Listener) -> None:
        """Connects the points that take over what this one makes (see `Point.followers` and `Point.branches`)."""
        branches = point.point.branches if listener.kind in ("bwd", "edge") else ()
        key = (point, listener.owner)
        if not (point.point.followers or branches) or key in self._following:
            return
        handles: list[Any] = [
            self.add(self.points[f.name], Listener("follow", self._follow(point, f), listener.owner), prepend=True)
            for f in point.point.followers
        ]
        sites = [self.points[name].point.site for name in branches]
        fused = len(set(sites)) < len(sites)
        for name, site in zip(branches, sites, strict=True):
            hook = self._site(site if fused else Site(site.path, "input"))
            handles.append(_Reading(hook, self.points[name]))
        self._following[key] = handles

    def _stop_leading(self, point: HookPoint, left: tuple[Listener, ...]) -> None:
        kinds = ("bwd", "edge") if point.point.branches else ("fwd", "bwd", "edge")
        needed = {listener.owner for listener in left if listener.kind in kinds}
        for key in [key for key in self._following if key[0] is point and key[1] not in needed]:
            for handle in self._following.pop(key):
                handle.remove()

    @staticmethod
    def _follow(leader: HookPoint, follower: Follower) -> Any:
        def take_over(value: Tensor, hook: HookPoint) -> Tensor | None:
            written = STATE.followed.get(leader)
            return None if written is None else follower.convert(written)

        return take_over

    def _check(self, point: HookPoint, listener: Listener) -> None:
        """Refuses what one run cannot give.

        Raises:
            ValueError: gradients are asked for at the norm that the heads share, in a run in which heads are given
                inputs of their own.
        """
        gradient = listener.kind in ("bwd", "edge")
        if point.point.branches and gradient:
            clash, kinds = _own_inputs, frozenset({"fwd", "bwd", "edge", "follow"})
        elif _own_inputs(point) and listener.kind != "read":
            clash, kinds = _shared_norm, frozenset({"bwd", "edge"})
        else:
            return
        block = (point.point.stack, point.point.depth)
        for other in self._by_block()[block]:
            if clash(other) and any(x.owner is listener.owner and x.kind in kinds for x in other.listeners):
                raise ValueError(
                    f"{point.name} and {other.name} cannot be had together: with hooks at the one each head reads an "
                    "input of its own, and then the gradient at the other, which all heads share, means nothing. "
                    "Use two runs (for a cache of everything, switch set_use_split_qkv_input and set_use_attn_in off)."
                )

    def _by_block(self) -> dict[tuple[str, int], list[HookPoint]]:
        if not self._blocks:
            for point in self.points.values():
                self._blocks.setdefault((point.point.stack, point.point.depth), []).append(point)
        return self._blocks


def _own_inputs(point: HookPoint) -> bool:
    return point.point.flag in ("use_split_qkv_input", "use_attn_in") and not isinstance(point.view, Branch)


def _shared_norm(point: HookPoint) -> bool:
    return bool(point.point.branches)


class _Reading:
    """A reader's claim to a copy of its own, until it is removed."""

    def __init__(self, hook: SiteHook, reader: HookPoint) -> None:
        self.hook, self.reader = hook, reader
        hook.readers = (*hook.readers, reader)
        hook.update()

    def remove(self) -> None:
        readers = list(self.hook.readers)
        readers.remove(self.reader)
        self.hook.readers = tuple(readers)
        self.hook.update()


def strip(model: nn.Module) -> None:
    """Takes what is ours from a copy of a model that was made while hooks were attached."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), SiteHook)]:
                del hooks[key]
    untap(model)
