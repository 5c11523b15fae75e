"""`Wiring`: where hook points meet torch, with one torch hook for each site that somebody listens to.

What comes in are listeners at hook points, and what their adapter declares of these: the site, a path into the model,
and what to read there. What goes out is a model with exactly the torch hooks that those listeners need, and, when
they are gone, the model as it was.

1. *Place.* Each declared point gets a home (`place`): the `SiteHook` of a module's input or output, which several
   points may share, or a tap for what lies inside of a forward (`TAPS`). Nothing is attached by that.
2. *Add.* The first listener at a point connects it (`add`, `_connect`): its torch hook or its tap, those of the sites
   that its view needs besides, and the points that follow it. The last one to go takes them away (`remove`), by
   handle. Hooks of a scope come and go together (`scoped`).
3. *Read many.* A cache of everything is at hundreds of places, and to ask at each who sees what costs as much as a
   small model's pass. Where nobody changes anything, a `ReadingPlan` knows all places, and is used again (`reading`).
4. *Direct calls.* While somebody may change something, a call of the Hugging Face model itself has to be told apart
   as a pass (`PassBoundary`), compiled code has to stand aside, and blocks that backward computes again bring their
   hooks along: all in `bridge.wiring.compiled`.

Refused: hooks that one run cannot serve together (`check_clash`); a module that was replaced while hooks were on it,
or that stands at two places; attaching from within compiled code. Not known here: what a run takes and returns,
tokens, families of models. What processes share is asked of `sharing`, which a model in one process does not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from adapters.points import Point, Site, base_path, core_of, core_path, has_module
from adapters.spread import Layout, refuse_context_parallel
from adapters.views import Branch
from bridge.hooks.context import CURRENT, Listener, Scope, open_scope
from bridge.hooks.hooks import AttachesListeners, HookPoint, LeaderEdit
from bridge.hooks.modules import Finder, TokenEmbedding, check_places
from bridge.sharing import Sharing
from bridge.taps.attention import AttentionTap
from bridge.taps.experts import BatchedExpertsWatch, ExpertsWatch, RouterWatch
from bridge.taps.recurrence import MixerWatch
from bridge.taps.taps import LOCK, CallWatch, Tap, noop_hook
from bridge.wiring.compiled import CheckpointedBlocks, ForcedEager, PassBoundary, refuse_inside_compiled
from bridge.wiring.reading_plan import Keep, ReadingPlan
from bridge.wiring.site import (
    CallCounter,
    OwnedHook,
    SharedSite,
    SiteHook,
    add_all,
    remove_all,
)

T = TypeVar("T")


class Wiring(AttachesListeners):
    """All hook points of one model, and the torch hooks that serve them.

    Args:
        model: the Hugging Face model.
        points: what its adapter declares.
        make: the class of its hook points.
        layout: how the model is spread over processes; None where it is not.

    Attributes:
        points: the hook points by name, in the order of the computation.
        embedding: finds the token embeddings.
        calls: counts those of modules that run several times.
        sharing: what processes that share the model do together; None where one has it alone.
        tapped: the kind of tap that stands on a module, by its path.
    """

    def __init__(
        self,
        model: nn.Module,
        points: Iterable[Point],
        make: type[HookPoint] = HookPoint,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        self._model = Finder(model, "")
        self.points: dict[str, HookPoint] = {}
        self.sharing = None if layout is None else Sharing(layout, self.points, core_of(model))
        self.tapped: dict[str, str] = {}
        self.calls = CallCounter()
        self._sites: dict[Site, SiteHook] = {}
        self._attached: dict[SiteHook, None] = {}
        self._homes: dict[HookPoint, SiteHook | None] = {}
        self._taps: dict[HookPoint, Tap] = {}
        self._following: dict[tuple[HookPoint, Scope | None], list[Callable[[], None]]] = {}
        self._siblings: dict[tuple[str, str], tuple[SiteHook, ...]] = {}
        self._finders: dict[str, Finder] = {}
        self._sources: dict[tuple[str, int], tuple[SiteHook, ...]] = {}
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
            ForcedEager(Finder(model, core_path(model))),
            self._check_direct_call,
            self.has_unseen_hooks,
        )
        self.embedding = TokenEmbedding(core_of(model))
        self._blocks = [Finder(model, path) for path in blocks]
        self._lists = [Finder(model, path) for path in dict.fromkeys(path.rpartition(".")[0] for path in blocks)]
        inside = dict.fromkeys(hook.point.site.path for hook in self.points.values() if hook.point.stack)
        check_places([Finder(model, path) for path in inside if path and has_module(model, path)])

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model.root

    def place(self, hook: HookPoint) -> None:
        """Takes in a hook point, and finds its sites, as its `point` says."""
        point = hook.point
        self.points[hook.name] = hook
        self._homes[hook] = None if point.site.kind in TAPS else self._site(point.site)
        if point.site.kind in TAPS:
            self.tapped[point.site.path] = point.site.kind
        hook.sources = tuple([self._site(source) for source in point.sources])
        self.calls.add(self.model, [site.path for site in (point.site, *point.sources)])
        self._by_block.clear()
        self._siblings.clear()
        self._sources.clear()
        self._plans.clear()

    def adopt(self, hook: HookPoint) -> None:
        """Takes in a hook point that a module of the user's calls itself: there is no torch hook behind it."""
        self.points[hook.name] = hook
        self._homes[hook] = SiteHook(hook.point.site)
        self._by_block.clear()
        self._plans.clear()

    def insert(self, hook: HookPoint, behind: HookPoint) -> None:
        """Takes in a hook point that comes right behind another one, and behind what stands on that already."""
        with self.lock:
            self.place(hook)
            order_behind(self.points, hook, behind)

    def remove_point(self, hook: HookPoint) -> None:
        """Takes a hook point out again, with the hooks on it."""
        with self.lock:
            self.remove(hook, hook.listeners)
            del self.points[hook.name], self._homes[hook]
            self._by_block.clear()
            self._sources.clear()
            self._plans.clear()

    def _check_direct_call(self) -> None:
        """As `check_in_place`, where the model is called directly: all processes have to."""
        self.check_in_place()
        refuse_context_parallel()
        if self.sharing is not None:
            self.sharing.meet("the model's own call, where hooks are attached,")

    def check_in_place(self) -> None:
        """Looks whether what hooks are attached to is still what stands there.

        Raises:
            RuntimeError: a module was replaced while hooks were on it.
            ValueError: one module is at two places in the list of blocks.
        """
        blocks: set[nn.Module | None] = set()
        for held in self._lists:
            blocks.update(held.module._modules.values())
        if len(blocks) != len(self._blocks):  # one stands twice, or is gone
            check_places(self._blocks)
        if not self._editors:
            return  # what only looks is attached for one run, a moment before
        with self.lock:  # other threads may attach hooks meanwhile
            moved = [hook.site.path for hook in self._attached if not hook.is_in_place]
            for point, tap in self._taps.items():
                if self.finder(point.point.site.path).module is not tap.module:
                    moved.append(point.point.site.path)
        for path in moved:
            raise RuntimeError(
                f"the module at {path!r} was replaced while hooks were on it, so they would not be called: replace "
                "modules first, and attach hooks then"
            )

    def compared(self, make: Callable[[], T], given: Tensor, point: HookPoint) -> T:
        return make() if self.sharing is None else self.sharing.compared(make, given, point.name)

    def has_unseen_hooks(self) -> bool:
        """Whether hooks of a ``with`` statement are attached that the present code does not see."""
        visible = CURRENT.get().visible
        active = [listener for point in self.points.values() for listener in point.listeners if listener.kind != "read"]
        return any(one.scope is not None and not one.scope.of_one_run and one.scope not in visible for one in active)

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
        with self.lock:
            declared = point.point
            if listener.kind != "read" and (declared.separate_consumers or declared.flag is not None):
                check_clash(point, listener, partial(self._in_block, declared.stack, declared.depth))
            if not point.listeners:
                self._connect(point)
            point.add_listener(listener, prepend)
            if listener.kind != "read":
                self._count_editor(listener, 1)
                if (home := self._homes[point]) is not None and len(home.points) > 1:
                    home.listeners_changed()
                if declared.linked or declared.separate_consumers:
                    self._connect_followers(point, listener)

    def remove(self, point: HookPoint, gone: Iterable[Listener]) -> None:
        """Removes listeners, and the torch hook if nobody is left. Those that are not there are ignored."""
        with self.lock:
            left_out = set(gone)
            there = [listener for listener in point.listeners if listener in left_out]
            if not there:
                return
            point.keep_listeners([listener for listener in point.listeners if listener not in left_out])
            for listener in there:
                if listener.kind != "read":
                    self._count_editor(listener, -1)
            left = point.listeners
            if self._following:
                self._disconnect_followers(point, left)
            if not left:
                self._disconnect(point)
            elif (home := self._homes[point]) is not None and len(home.points) > 1:
                home.listeners_changed()

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

    def listen(self, points: Iterable[HookPoint], listener: Listener) -> None:
        """Attaches a listener that only looks to many points."""
        refuse_inside_compiled()
        attached: list[HookPoint] = []
        connected: HookPoint | None = None
        with self.lock:
            try:
                for point in points:
                    if not point.listeners:
                        self._connect(point, connected)
                        connected = point
                    point.add_listener(listener)
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
        with self.lock:
            plan = next((plan for plan in self._plans if plan.points == points and plan.holds), None)
            if plan is None:
                plan = ReadingPlan(points, self._homes)
                self._plans.append(plan)
            quick = not self._attached or plan.is_free
            others = plan.others if quick else points
            self.listen(others, listener)
            self._connected += quick
        try:
            with (
                self.calls.counted() if self.calls.modules else nullcontext(),
                plan.attached(keep, listener.scope) if quick else nullcontext(),
            ):
                yield
        finally:
            with self.lock:
                self.stop_listening(others, listener)
                self._connected -= quick

    def stop_listening(self, points: Iterable[HookPoint], listener: Listener) -> None:
        """Removes what `listen` attached."""
        with self.lock:
            for point in points:
                point.keep_listeners([other for other in point.listeners if other is not listener])
                if not point.listeners:
                    self._disconnect(point)

    def finder(self, path: str) -> Finder:
        """What finds the module at a path."""
        if path not in self._finders:
            self._finders[path] = Finder(self.model, path)
        return self._finders[path]

    def sources_in(self, stack: str, depth: int) -> tuple[SiteHook, ...]:
        """The sites whose tensors the views of a block's points need."""
        with self.lock:
            found = self._sources.get((stack, depth))
            if found is None:
                sites = [source for point in self._in_block(stack, depth) for source in point.point.sources]
                found = self._sources[stack, depth] = tuple([self._sites[site] for site in dict.fromkeys(sites)])
            return found

    def elements_of(self, site: Site) -> tuple[SiteHook, ...]:
        """The sites of all elements of what a module returns, or is given; none where there is one alone."""
        with self.lock:
            if not self._siblings:
                for other in self._sites.values():
                    key = other.site.path, other.site.kind
                    self._siblings[key] = (*self._siblings.get(key, ()), other)
            found = self._siblings.get((site.path, site.kind), ())
        return found if len(found) > 1 else ()

    def _connect(self, point: HookPoint, before: HookPoint | None = None) -> None:
        """Attaches what a hook point needs; the one `before` it was connected just now."""
        if self.calls.modules:
            self.calls.change(1)
        if (home := self._homes[point]) is None:
            site = point.point.site
            same = before is not None and (before.point.site.path, before.point.site.kind) == (site.path, site.kind)
            with LOCK:  # another bridge around the model may be about to take its tap away
                tap = self._taps[before] if same and before else tap_on(site.kind, self.finder(site.path).module)
                if self.sharing is not None and (shared := self.sharing.tensor_at(site)) is not None:
                    shared.check_in_place(tap.module)
                    tap.shared[str(site.key)] = shared
                self._taps[point] = tap
                tap.connect(str(site.key), point)
        else:
            home.add(point)
        for source in point.point.sources:
            self._sites[source].watch(1)
        self._connected += 1

    def _disconnect(self, point: HookPoint) -> None:
        self._connected -= 1
        if self.calls.modules:
            self.calls.change(-1)
        if (home := self._homes[point]) is None:
            with LOCK:
                self._taps.pop(point).disconnect(str(point.point.site.key), point)
        else:
            home.discard(point)
        for source in point.point.sources:
            self._sites[source].watch(-1)

    def _site(self, site: Site) -> SiteHook:
        hook = self._sites.get(site)
        if hook is None:
            find = Finder(self.model, site.path)
            shared = None if self.sharing is None else self.sharing.tensor_at(site)
            if shared is None:
                hook = SiteHook(site, find, self._attached)
            else:
                hook = SharedSite(site, find, self._attached, shared)
            self._sites[site] = hook
        return hook

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
        """Connects the points that take over what this one makes (`Point.linked`, `Point.separate_consumers`)."""
        separate_consumers = point.point.separate_consumers if listener.kind in ("bwd", "edge") else ()
        key = (point, listener.scope)
        if not (point.point.linked or separate_consumers) or key in self._following:
            return
        following: list[Callable[[], None]] = []
        for follower in point.point.linked:
            takes_over = Listener("leader", LeaderEdit(point.name, follower), listener.scope)
            other = self.points[follower.name]
            self.add(other, takes_over, prepend=True)
            following.append(partial(self.remove, other, (takes_over,)))
        sites = [self.points[name].point.site for name in separate_consumers]
        fused = len(set(sites)) < len(sites)
        for name, site in zip(separate_consumers, sites, strict=True):
            hook = self._site(site if fused else Site(site.path, "input"))
            following.append(hook.claim(self.points[name]))
        self._following[key] = following

    def _disconnect_followers(self, point: HookPoint, left: tuple[Listener, ...]) -> None:
        kinds = ("bwd", "edge") if point.point.separate_consumers else ("fwd", "bwd", "edge", "follow", "leader")
        needed = {listener.scope for listener in left if listener.kind in kinds}
        for key in [key for key in self._following if key[0] is point and key[1] not in needed]:
            for remove in self._following.pop(key):
                remove()

    def _in_block(self, stack: str, depth: int) -> list[HookPoint]:
        if not self._by_block:
            for hook in self.points.values():
                self._by_block.setdefault((hook.point.stack, hook.point.depth), []).append(hook)
        return self._by_block.get((stack, depth), [])


# ----------------------------------------------------------------------------------------------------------------------
# Which tap is for which kind of site that is not simply a module's input or output.
# ----------------------------------------------------------------------------------------------------------------------


#: The tap for each kind of site that is not simply a module's input or output, or what such a tap sees a call with.
TAPS: dict[str, type[Tap] | type[CallWatch]] = {
    "attention": AttentionTap,
    "softmax": AttentionTap,
    "experts": ExpertsWatch,
    "batched experts": BatchedExpertsWatch,
    "router": RouterWatch,
    "recurrence": MixerWatch,
}


def tap_on(kind: str, module: nn.Module) -> Tap:
    """The tap of this kind on a module: the one that another bridge around the model has put there, or a new one."""
    there, kept = module.__dict__.get("forward"), TAPS[kind]
    if isinstance(there, Tap) and kept in (type(there), there.watch):
        return there
    return kept(module) if issubclass(kept, Tap) else Tap(module, kept)


# ----------------------------------------------------------------------------------------------------------------------
# Hook points that one run cannot serve together.
# ----------------------------------------------------------------------------------------------------------------------


def check_clash(point: HookPoint, listener: Listener, in_block: Callable[[], Iterable[HookPoint]]) -> None:
    """Refuses what one run cannot give.

    Args:
        point: the hook point.
        listener: what is to be attached there.
        in_block: the hook points of the same block.

    Raises:
        ValueError: gradients are asked for at the norm that the heads share, in a run in which heads are
            given inputs of their own.
    """
    asks = bool(point.point.separate_consumers) and listener.kind in ("bwd", "edge")
    if not (asks or _own_inputs(point)):
        return
    visible = CURRENT.get().visible
    kinds = ("fwd", "bwd", "edge", "follow", "leader") if asks else ("bwd", "edge")
    for other in in_block():
        if (_own_inputs(other) if asks else other.point.separate_consumers) and any(
            x.kind in kinds and (x.scope is listener.scope or x.scope in visible) for x in other.listeners
        ):
            raise ValueError(
                f"{point.name} and {other.name} cannot be had together: with hooks at the one each head reads an "
                "input of its own, and then the gradient at the other, which all heads share, means nothing. "
                "Use two runs. (A filter is asked about every hook point: let it leave out names with attn_in and "
                "_input. For a cache of everything, switch set_use_split_qkv_input and set_use_attn_in off.)"
            )


def _own_inputs(point: HookPoint) -> bool:
    return point.point.flag in ("use_split_qkv_input", "use_attn_in") and not isinstance(point.view, Branch)


# ----------------------------------------------------------------------------------------------------------------------
# The order of hook points when one comes in later.
# ----------------------------------------------------------------------------------------------------------------------


def order_behind(points: dict[str, HookPoint], hook: HookPoint, behind: HookPoint) -> None:
    """Moves a hook point right behind another one and what stands on that, and counts all of them anew.

    It comes before those that follow a point elsewhere, unless it does so itself: what they add goes on top.

    Args:
        points: the hook points by name, in their order; changed in place.
        hook: the one to be moved.
        behind: the other one.
    """
    in_order = [point for point in points.values() if point is not hook]
    at = in_order.index(behind) + 1
    following = {follower.name for point in in_order for follower in point.point.linked}
    last = hook.name in following
    while at < len(in_order) and in_order[at].name.startswith(f"{behind.name}."):
        if in_order[at].name in following and not last:
            break
        at += 1
    in_order.insert(at, hook)
    points.clear()
    points.update((point.name, point) for point in in_order)
    for order, point in enumerate(in_order):
        point.order = order


# ----------------------------------------------------------------------------------------------------------------------
# What a trace keeps ready while the model runs, for what its body may ask for next.
# ----------------------------------------------------------------------------------------------------------------------


class TraceOpenings:
    """Modules that take notice of hooks which come while they run, and sites that are watched before anyone listens.

    torch looks for hooks once, when a module is called, and a tap wraps its module's forward. A view that needs
    what is seen elsewhere in its block needs it seen before somebody asks for that view.

    Args:
        wiring: of the bridge.
        scope: of the trace.
    """

    def __init__(self, wiring: Wiring, scope: Scope) -> None:
        self._wiring, self._scope = wiring, scope
        self._noticing = [OwnedHook(id(scope), noop_hook, False)]
        self._paths: set[str] = set()
        self._modules: list[nn.Module] = []
        self._taps: list[Tap] = []
        self._watched: dict[SiteHook, None] = {}

    def open(self, path: str) -> None:
        """Lets the scope begin to listen to the modules on a path, and inside them, while they run."""
        if path in self._paths:
            return
        wiring = self._wiring
        with wiring.lock:
            modules = wiring.finder(path).modules_on_path
            while path not in self._paths:
                self._paths.add(path)
                module = modules.pop()
                if type(module).forward is not nn.Module.forward:  # a list of modules is never called
                    add_all((module,), self._noticing)
                    self._modules.append(module)
                kind = wiring.tapped.get(path)
                if kind is not None and kind != "experts":  # that tap computes one expert at a time
                    with LOCK:
                        tap = tap_on(kind, module)
                        tap.open(self._scope)
                    self._taps.append(tap)
                path = path.rpartition(".")[0]

    def watch(self, sites: Iterable[SiteHook]) -> None:
        """Keeps what passes some sites, for views that somebody may ask for behind them."""
        with self._wiring.lock:
            for site in sites:
                if site not in self._watched:
                    self._watched[site] = None
                    site.watch(1)

    def close(self) -> None:
        """Ends all of it."""
        with self._wiring.lock:
            remove_all(self._modules, self._noticing * len(self._modules))
            self._modules.clear()
            with LOCK:
                while self._taps:
                    self._taps.pop().close(self._scope)
            while self._watched:
                self._watched.popitem()[0].watch(-1)
            self._paths.clear()
