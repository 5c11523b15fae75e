"""Where hook points meet torch: one torch hook for each site that someone listens to, and none for the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn

from adapters.paths import base_path, core_path, has_module
from adapters.points import Point, Site
from bridge.hooks.context import Scope, open_scope
from bridge.hooks.followers import Following, take_over_from
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Listener
from bridge.hooks.modules import Finder, TokenEmbedding, check_places
from bridge.taps.tap import Tap
from bridge.taps.taps import TAPS, tap_on
from bridge.wiring.boundary import PassBoundary, only_there
from bridge.wiring.calls import Calls
from bridge.wiring.checkpointing import CheckpointedBlocks
from bridge.wiring.clashes import check_clash
from bridge.wiring.compiled import AsWritten, refuse_inside_compiled
from bridge.wiring.reading_plan import Keep, ReadingPlan
from bridge.wiring.separate_reads import SeparateReading
from bridge.wiring.site import SiteHook
from bridge.wiring.torch_hooks import put_behind, take_away


class Wiring:
    """All hook points of one model, and the torch hooks that serve them.

    Args:
        model: the Hugging Face model.
        points: what its adapter declares.
        make: the class of its hook points.

    Attributes:
        points: the hook points by name, in the order of the computation.
        changes: how often a hook was added or removed that every run sees.
        embedding: finds the token embeddings.
        calls: counts those of modules that run several times.
    """

    def __init__(self, model: nn.Module, points: Iterable[Point], make: type[HookPoint] = HookPoint) -> None:
        self.model = model
        self.points: dict[str, HookPoint] = {}
        self.changes = 0
        self.calls = Calls()
        self._lock = threading.RLock()
        self._sites: dict[Site, SiteHook] = {}
        self._homes: dict[HookPoint, SiteHook | None] = {}
        self._taps: dict[HookPoint, Tap] = {}
        self._following: dict[tuple[HookPoint, Scope | None], list[SeparateReading | Following]] = {}
        self._opened: dict[Scope, dict[str, list[Callable[[], None]]]] = {}
        self._tapped_paths: dict[str, str] = {}
        self._siblings: dict[tuple[str, str], list[Site]] = {}
        self._connected = 0
        self._editors = 0
        self._by_block: dict[tuple[str, int], list[HookPoint]] = {}
        self._plans: deque[ReadingPlan] = deque(maxlen=4)
        for order, point in enumerate(points):
            self.place(make(point, order, self))
        blocks = [hook.point.site.path for name, hook in self.points.items() if name.endswith("hook_resid_pre")]
        stacks = dict.fromkeys(
            [base_path(model), *(path.rsplit(".", 2)[0] if path.count(".") > 1 else "" for path in blocks)]
        )
        self._boundary = PassBoundary(
            [Finder(model, path) for path in stacks],
            CheckpointedBlocks([Finder(model, path) for path in (*stacks, *blocks)], self),
            AsWritten(Finder(model, core_path(model))),
            self.check_in_place,
        )
        self.embedding = TokenEmbedding(model.get_submodule(core_path(model)))
        self._blocks = [Finder(model, path) for path in blocks]
        self._lists = [Finder(model, path) for path in dict.fromkeys(path.rpartition(".")[0] for path in blocks)]
        inside = dict.fromkeys(hook.point.site.path for hook in self.points.values() if hook.point.stack)
        check_places([Finder(model, path) for path in inside if path and has_module(model, path)])

    def place(self, hook: HookPoint) -> None:
        """Takes in a hook point, and finds its sites, as its `point` says."""
        point = hook.point
        self.points[hook.name] = hook
        self._homes[hook] = None if point.site.kind in TAPS else self._site(point.site)
        if point.site.kind in TAPS:
            self._tapped_paths[point.site.path] = point.site.kind
        hook.sources = tuple([self._site(source) for source in point.sources])
        self.calls.add(self.model, [site.path for site in (point.site, *point.sources)])
        self._by_block.clear()
        self._siblings.clear()
        self._plans.clear()

    def adopt(self, hook: HookPoint) -> None:
        """Takes in a hook point that a module of the user's calls itself: there is no torch hook behind it."""
        self.points[hook.name] = hook
        self._homes[hook] = SiteHook(hook.point.site)
        self._by_block.clear()
        self._plans.clear()

    def check_in_place(self) -> None:
        """Looks whether what hooks are attached to is still what stands there.

        Raises:
            RuntimeError: a module was replaced while hooks were on it.
            ValueError: one module stands at two places in the list of blocks.
        """
        blocks = {block for held in self._lists for block in held.module._modules.values()}
        if len(blocks) != len(self._blocks):  # one stands twice, or is gone
            check_places(self._blocks)
        if not self._editors:
            return  # what only looks is attached for one run, a moment before
        with self._lock:  # other threads may attach hooks meanwhile
            moved = [hook.site.path for hook in self._sites.values() if not hook.is_in_place]
            for point, tap in self._taps.items():
                if Finder(self.model, point.point.site.path).module is not tap.module:
                    moved.append(point.point.site.path)
        for path in moved:
            raise RuntimeError(
                f"the module at {path!r} was replaced while hooks were on it, so they would not be called: replace "
                "modules first, and attach hooks then"
            )

    @property
    def listening(self) -> bool:
        """Whether anyone listens to anything."""
        return self._connected > 0

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attaches a listener, and the torch hook it needs if nobody needed it yet.

        Raises:
            ValueError: see `check_clash`; nothing is attached then.
        """
        refuse_inside_compiled()
        with self._lock:
            declared = point.point
            if listener.kind != "read" and (declared.branches or declared.flag is not None):
                check_clash(point, listener, partial(self._in_block, declared.stack, declared.depth))
            if not point.listeners:
                self._connect(point)
            point.set_listeners((listener, *point.listeners) if prepend else (*point.listeners, listener))
            if listener.kind != "read":
                self._count_editor(listener, 1)
                self._listeners_changed(point)
                if declared.followers or declared.branches:
                    self._connect_followers(point, listener)

    def remove(self, point: HookPoint, gone: Iterable[Listener]) -> None:
        """Removes listeners, and the torch hook if nobody is left. Those that are not there are ignored."""
        with self._lock:
            before = point.listeners
            gone = [listener for listener in gone if listener in before]
            if not gone:
                return
            left = tuple([listener for listener in before if listener not in gone])
            point.set_listeners(left)
            for listener in gone:
                if listener.kind != "read":
                    self._count_editor(listener, -1)
            self._listeners_changed(point)
            if self._following:
                self._disconnect_followers(point, left)
            if not left:
                self._disconnect(point)

    @contextmanager
    def scoped(self, members: Sequence[tuple[HookPoint, Listener]], scope: Scope) -> Iterator[None]:
        """Attaches listeners for the runs that start inside a ``with`` statement, and for those alone.

        Args:
            members: the hook points and their listeners.
            scope: what the listeners belong to.
        """
        refuse_inside_compiled()
        scope.members.extend(members)
        self.attach_scope(scope)
        try:
            with open_scope(scope):
                yield
        finally:
            self.detach_scope(scope)

    def attach_scope(self, scope: Scope) -> None:
        """Attaches the hooks of a scope, if they are not attached already."""
        with self._lock:
            scope.users += 1
            if scope.users > 1:
                return
            try:
                for point, listener in scope.members:
                    if listener not in point.listeners:
                        self.add(point, listener)
            except BaseException:
                self.detach_scope(scope)
                raise

    def detach_scope(self, scope: Scope) -> None:
        """The reverse of `attach_scope`, once nobody needs them any more."""
        with self._lock:
            scope.users -= 1
            if not scope.users:
                for point, listener in scope.members:
                    self.remove(point, (listener,))

    def listen(self, points: Iterable[HookPoint], listener: Listener) -> None:
        """Attaches a listener that only looks to many points."""
        refuse_inside_compiled()
        attached: list[HookPoint] = []
        with self._lock:
            try:
                for point in points:
                    if not point.listeners:
                        self._connect(point)
                    point.set_listeners((*point.listeners, listener))
                    attached.append(point)
            except BaseException:
                self.stop_listening(attached, listener)
                raise

    @contextmanager
    def reading(self, points: Sequence[HookPoint], listener: Listener, keep: Keep) -> Iterator[None]:
        """Listens to many points inside a ``with`` statement, for runs that see the listener's scope.

        Args:
            points: the hook points.
            listener: attached where somebody else stands too, who may change what is read, or a tap does.
            keep: is given what passes all other places.
        """
        refuse_inside_compiled()
        with self._lock:
            plan = next((plan for plan in self._plans if plan.points == points and plan.holds), None)
            if plan is None:
                plan = ReadingPlan(points, self._homes)
                self._plans.append(plan)
            quick = plan.is_free
            self._connected += quick
        others = plan.others if quick else points
        self.listen(others, listener)
        try:
            with self.calls.counted(), plan.attached(keep, listener.scope) if quick else nullcontext():
                yield
        finally:
            self.stop_listening(others, listener)
            self._connected -= quick

    def stop_listening(self, points: Iterable[HookPoint], listener: Listener) -> None:
        """Removes what `listen` attached."""
        with self._lock:
            for point in points:
                left = tuple([other for other in point.listeners if other is not listener])
                point.set_listeners(left)
                if not left:
                    self._disconnect(point)

    def open_path(self, path: str, scope: Scope) -> None:
        """Lets a scope begin to listen to the modules on a path, and inside them, while they run.

        torch looks for hooks once, when a module is called, and a tap stands before its module's forward.
        """
        with self._lock:
            opened = self._opened.setdefault(scope, {})
            modules = [] if path in opened else Finder(self.model, path).on_the_way
            while path not in opened:
                module, opened[path] = modules.pop(), []
                if type(module).forward is not nn.Module.forward:  # a list of modules is never called
                    put_behind(module, scope, only_there)
                    opened[path].append(partial(take_away, module, scope))
                kind = self._tapped_paths.get(path)
                if kind is not None and kind != "experts":  # that tap computes one expert at a time
                    tap = tap_on(kind, module)
                    tap.open(scope)
                    opened[path].append(partial(tap.close, scope))
                path = path.rpartition(".")[0]

    def watch_sources(self, stack: str, depth: int, scope: Scope) -> None:
        """Lets a scope begin to listen to the points of a block whose views need what is seen before them."""
        with self._lock:
            opened, key = self._opened.setdefault(scope, {}), f"sources of {stack} {depth}"
            if key in opened:
                return
            opened[key] = []
            for point in self._in_block(stack, depth):
                for source in point.point.sources:
                    opened[key].append(self._watched(self._sites[source]))

    def watch_siblings(self, site: Site, scope: Scope) -> None:
        """Lets a scope begin to listen to the other elements of what a module returns while one of them is shown."""
        with self._lock:
            if not self._siblings:
                for other in self._sites:
                    self._siblings.setdefault((other.path, other.kind), []).append(other)
            siblings = self._siblings.get((site.path, site.kind), [])
            opened, key = self._opened.setdefault(scope, {}), f"{site.kind} of {site.path}"
            if len(siblings) > 1 and key not in opened:
                opened[key] = [self._watched(self._sites[other]) for other in siblings]

    def _watched(self, hook: SiteHook) -> Callable[[], None]:
        """Watches a site; what ends it again."""
        hook.watchers += 1
        hook.update()

        def leave() -> None:
            hook.watchers -= 1
            hook.update()

        return leave

    def close_paths(self, scope: Scope) -> None:
        """The reverse of `open_path`, for all of a scope's."""
        with self._lock:
            for closers in self._opened.pop(scope, {}).values():
                for close in closers:
                    close()

    def _connect(self, point: HookPoint) -> None:
        self.calls.change(1)
        home = self._homes[point]
        if home is None:
            site = point.point.site
            tap = tap_on(site.kind, Finder(self.model, site.path).module)
            self._taps[point] = tap
            tap.connect(str(site.key), point)
        else:
            home.add(point)
        for source in point.point.sources:
            hook = self._sites[source]
            hook.watchers += 1
            hook.update()
        self._connected += 1

    def _disconnect(self, point: HookPoint) -> None:
        self._connected -= 1
        self.calls.change(-1)
        home = self._homes[point]
        if home is None:
            self._taps.pop(point).disconnect(str(point.point.site.key), point)
        else:
            home.discard(point)
        for source in point.point.sources:
            hook = self._sites[source]
            hook.watchers -= 1
            hook.update()

    def _site(self, site: Site) -> SiteHook:
        hook = self._sites.get(site)
        if hook is None:
            hook = self._sites[site] = SiteHook(site, Finder(self.model, site.path))
        return hook

    def _listeners_changed(self, point: HookPoint) -> None:
        home = self._homes[point]
        if home is not None and len(home.points) > 1:
            home.listeners_changed()

    def _count_editor(self, listener: Listener, by: int) -> None:
        """Direct calls of the model have to be told apart as passes while anyone may change something."""
        if listener.scope is None:
            self.changes += 1
        elif listener.scope.of_one_run:
            return
        self._editors += by
        if self._editors == by == 1:
            self._boundary.attach()
        elif not self._editors:
            self._boundary.detach()

    def _connect_followers(self, point: HookPoint, listener: Listener) -> None:
        """Connects the points that take over what this one makes (see `Point.followers` and `Point.branches`)."""
        branches = point.point.branches if listener.kind in ("bwd", "edge") else ()
        key = (point, listener.scope)
        if not (point.point.followers or branches) or key in self._following:
            return
        following: list[SeparateReading | Following] = []
        for follower in point.point.followers:
            takes_over = Listener("follow", take_over_from(point, follower), listener.scope)
            other = self.points[follower.name]
            self.add(other, takes_over, prepend=True)
            following.append(Following(self, other, takes_over))
        sites = [self.points[name].point.site for name in branches]
        fused = len(set(sites)) < len(sites)
        for name, site in zip(branches, sites, strict=True):
            hook = self._site(site if fused else Site(site.path, "input"))
            following.append(SeparateReading(hook, self.points[name]))
        self._following[key] = following

    def _disconnect_followers(self, point: HookPoint, left: tuple[Listener, ...]) -> None:
        kinds = ("bwd", "edge") if point.point.branches else ("fwd", "bwd", "edge")
        needed = {listener.scope for listener in left if listener.kind in kinds}
        for key in [key for key in self._following if key[0] is point and key[1] not in needed]:
            for following in self._following.pop(key):
                following.remove()

    def _in_block(self, stack: str, depth: int) -> list[HookPoint]:
        if not self._by_block:
            for hook in self.points.values():
                self._by_block.setdefault((hook.point.stack, hook.point.depth), []).append(hook)
        return self._by_block.get((stack, depth), [])
