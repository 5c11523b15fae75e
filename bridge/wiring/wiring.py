"""`Wiring`: the connection of hook points to torch, with one torch hook for each site in use.

Input: listeners at hook points, and the adapter's declaration of each point: the site, a path into
the model, and what to read there. Output: a model with exactly the torch hooks that those listeners
need; without listeners, the unchanged model.

1. *Place.* Each declared point is assigned (`place`) to the `SiteHook` of a module's input or
   output, which several points may share, or to a tap for activations inside a forward (`TAPS`).
   This attaches nothing.
2. *Add.* The first listener at a point connects it (`add`, `_connect`): its torch hook or its tap,
   those of other sites that its view needs, and the points that follow it. Removing the last one
   disconnects it (`remove`), by handle. Hooks of a scope are added and removed together (`scoped`).
3. *Read many.* A full cache reads hundreds of sites, and checking the scopes at each would cost as
   much as a small model's pass. Without editors, a `ReadingPlan` holds all sites, and is reused
   (`reading`).
4. *Direct calls.* While a listener may change activations, a call of the Hugging Face model itself
   must be recognised as a pass (`PassBoundary`), compiled code must be disabled, and recomputed
   blocks must repeat their hooks: see `bridge.wiring.compiled`.

Errors: hooks that cannot be combined in one run (`check_clash`); a module that was replaced while
hooks were on it, or that is used at two places; attaching from within compiled code. This file does
not depend on the inputs and results of runs, on tokens, or on model families. `sharing` handles
models that processes share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from adapters.norms import weights_path
from adapters.points import Point, Site, base_path, core_of, core_path, has_module
from adapters.spread import Layout, refuse_context_parallel
from adapters.tuners import holder_of_parameters
from adapters.views import Branch
from bridge.hooks.context import CURRENT, Listener, Scope, open_scope
from bridge.hooks.hooks import AttachesListeners, HookPoint, LeaderEdit
from bridge.hooks.recomputation import region_numbers
from bridge.modules import Finder, TokenEmbedding, check_places
from bridge.sharing import Sharing
from bridge.taps.attention_tap import AttentionTap
from bridge.taps.experts import BatchedExpertsWatch, ExpertsWatch, RouterWatch
from bridge.taps.recurrence import MixerWatch
from bridge.taps.taps import LOCK, CallWatch, Tap, noop_hook
from bridge.wiring.compiled import ForcedEager, PassBoundary, refuse_inside_compiled
from bridge.wiring.reading_plan import Keep, ReadingPlan
from bridge.wiring.repeated import CheckpointedBlocks, refuse_repeated_call
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
    """The hook points of one model, and the torch hooks that serve them.

    Args:
        model: the Hugging Face model.
        points: the declarations of its adapter.
        make: the class of its hook points.
        layout: how the model is spread over processes; None if it is not.

    Attributes:
        points: the hook points by name, in the order of the computation.
        embedding: returns the token embeddings.
        calls: counts the calls of modules that run several times.
        sharing: the coordination of processes that share the model; None in one process.
        tapped: the kind of tap on a module, by its path.
        listening: how many hook points and plans are connected.
    """

    of_model = True

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
        self._finders: dict[str, Finder] = {}
        self.listening = 0
        self._editors = 0
        self._clear_caches()
        for order, point in enumerate(points):
            self.place(make(point, order, self))
        self.embedding = TokenEmbedding(core_of(model))
        self._find_blocks()

    def _find_blocks(self) -> None:
        """Find the blocks, their lists and their stacks. (A call of a stack is a pass.)

        Raises:
            ValueError: one module is at two places.
        """
        model, hooks = self.model, self.points.values()
        blocks = [hook.point.site.path for hook in hooks if hook.name.endswith("hook_resid_pre")]
        stacks = [base_path(model)]
        stacks += [path.rsplit(".", 2)[0] if path.count(".") > 1 else "" for path in blocks]
        self._blocks = finders_at(model, blocks)
        self._lists = finders_at(model, [path.rpartition(".")[0] for path in blocks])
        self._members = sum(len(finder.module._modules) for finder in self._lists)
        self._boundary = PassBoundary(
            finders_at(model, stacks),
            CheckpointedBlocks(finders_at(model, [*stacks, *blocks]), self),
            ForcedEager(Finder(model, core_path(model))),
            self._check_direct_call,
            self.has_unseen_hooks,
        )
        inside = [hook.point.site.path for hook in hooks if hook.point.stack]
        inside = [path for path in inside if path and has_module(model, path)]
        check_places(finders_at(model, inside))

    @property
    def model(self) -> nn.Module:
        """Return the model."""
        return self._model.root

    def place(self, hook: HookPoint) -> None:
        """Register a hook point, and resolve its sites as its `point` declares them."""
        point = hook.point
        self.points[hook.name] = hook
        self._homes[hook] = None if point.site.kind in TAPS else self._site(point.site)
        if point.site.kind in TAPS:
            self.tapped[point.site.path] = point.site.kind
        hook.sources = tuple([self._site(source) for source in point.sources])
        hook.weights = self.finder(weights_path(point))
        self.calls.add(self.model, [site.path for site in (point.site, *point.sources)])
        self._clear_caches()

    def adopt(self, hook: HookPoint) -> None:
        """Register a hook point that a user's module calls itself, without a torch hook."""
        self.points[hook.name] = hook
        self._homes[hook] = SiteHook(hook.point.site)
        self._clear_caches()

    def insert(self, hook: HookPoint, behind: HookPoint | None) -> None:
        """Register a hook point directly after another one and that one's followers; None: before
        all others.
        """
        with self.lock:
            self.place(hook)
            order_behind(self.points, hook, behind)

    def remove_point(self, hook: HookPoint) -> None:
        """Unregister a hook point, with its hooks."""
        with self.lock:
            self.remove(hook, hook.listeners)
            del self.points[hook.name], self._homes[hook]
            self._clear_caches()

    def _clear_caches(self) -> None:
        """Clear everything that was computed from the current hook points."""
        self._by_block: dict[tuple[str, int], list[HookPoint]] = {}
        self._siblings: dict[tuple[str, str], tuple[SiteHook, ...]] = {}
        self._sources: dict[tuple[str, int], tuple[SiteHook, ...]] = {}
        self._plans: deque[ReadingPlan] = deque(maxlen=4)

    def check_registered(self, hook: HookPoint) -> None:
        """Check that a hook point of this bridge was not removed.

        Raises:
            RuntimeError: it was.
        """
        if hook not in self._homes and hook.is_attached_by(self):
            raise RuntimeError(
                f"{hook.name} was removed, by remove_basis or at the end of `with"
                " bridge.basis(...)`: add the basis again. Where backward computes blocks again"
                " (activation checkpointing), run backward before the basis is removed"
            )

    def _check_direct_call(self) -> None:
        """Check the hooked modules at a direct call of the model; all processes must call it."""
        self.check_in_place()
        refuse_context_parallel()
        refuse_repeated_call(self)
        if self.sharing is not None:
            self.sharing.meet("the model's own call, where hooks are attached,")

    def check_in_place(self) -> None:
        """Check that the modules with hooks were not replaced.

        Raises:
            RuntimeError: a module was replaced while hooks were on it, or blocks were added.
            ValueError: one module is at two places in the list of blocks.
        """
        blocks: set[nn.Module | None] = set()
        members = 0
        for finder in self._lists:
            members += len(finder.module._modules)
            blocks.update(finder.module._modules.values())
        if members > self._members:
            raise RuntimeError(
                f"the model has {members - self._members} more blocks than when the bridge was"
                " made, without hook points: make a new bridge of it, TransformerBridge(model)"
            )
        if len(blocks) != len(self._blocks):  # a module appears twice, or is gone
            check_places(self._blocks)
        if not self._editors:
            return  # read-only listeners are attached for one run, a moment before
        with self.lock:  # other threads may attach hooks meanwhile
            moved = [hook.site.path for hook in self._attached if not hook.is_in_place]
            for point, tap in self._taps.items():
                tapped = holder_of_parameters(self.finder(point.point.site.path).module)
                if tapped is not tap.module:
                    moved.append(point.point.site.path)
        if moved:
            raise RuntimeError(
                f"the module at {moved[0]!r} was replaced while hooks were on it, so they would not"
                " be called: replace modules first, and attach hooks then"
            )

    def compared(self, make: Callable[[], T], gradient: Tensor, point: HookPoint) -> T:
        if self.sharing is None:
            return make()
        return self.sharing.compared(make, gradient, point.name)

    def has_unseen_hooks(self) -> bool:
        """Tell whether hooks of a ``with`` statement are attached that are not visible to the
        current code.
        """
        visible = CURRENT.get().visible
        for point in self.points.values():
            for listener in point.listeners:
                scope = listener.scope
                if scope is None or scope.of_one_run or listener.kind == "read":
                    continue
                if scope not in visible:
                    return True
        return False

    def attached_scopes(self) -> set[Scope | None]:
        """Return the scopes that listeners belong to; None represents added hooks."""
        return {listener.scope for point in self._homes for listener in point.listeners}

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attach a listener, and the torch hook that it needs.

        Raises:
            ValueError: see `check_clash`; nothing is attached then.
            RuntimeError: the hook point was removed.
        """
        refuse_inside_compiled()
        self.check_registered(point)
        with self.lock:
            declared = point.point
            edits = listener.kind != "read"
            separates = declared.separate_consumers or declared.flag is not None
            if edits and (separates or not declared.declared):
                in_block = partial(self._points_in_block, declared.stack, declared.depth)
                check_clash(point, listener, in_block)
            if not point.listeners:
                self._connect(point)
            point.add_listener(listener, prepend)
            if edits:
                self._count_editor(listener, 1)
                if (home := self._homes[point]) is not None and len(home.points) > 1:
                    home.listeners_changed()
                if home is not None and listener.kind in _GRADIENT_KINDS:
                    home.precede()
                if declared.linked or declared.separate_consumers:
                    self._connect_followers(point, listener)

    def remove(self, point: HookPoint, gone: Iterable[Listener]) -> None:
        """Remove listeners, and unused torch hooks. Listeners that are not attached are ignored."""
        with self.lock:
            leaving = set(gone)
            removed = [listener for listener in point.listeners if listener in leaving]
            if not removed:
                return
            point.keep_listeners([other for other in point.listeners if other not in leaving])
            for listener in removed:
                if listener.kind != "read":
                    self._count_editor(listener, -1)
            if self._following:
                self._disconnect_followers(point)
            if not point.listeners:
                self._disconnect(point)
            elif (home := self._homes[point]) is not None and len(home.points) > 1:
                home.listeners_changed()

    @contextmanager
    def scoped(self, members: Sequence[tuple[HookPoint, Listener]], scope: Scope) -> Iterator[None]:
        """Attach listeners only for the runs that start inside a ``with`` statement.

        Args:
            members: the hook points and their listeners.
            scope: the scope of the listeners.
        """
        refuse_inside_compiled()
        scope.opened_in = region_numbers()
        scope.members.extend(members)
        self.attach_scope(scope)
        try:
            with open_scope(scope):
                yield
        finally:
            self.detach_scope(scope)

    @contextmanager
    def reading(
        self, points: Sequence[HookPoint], listener: Listener, keep: Keep
    ) -> Iterator[None]:
        """Listen to many points inside a ``with`` statement, for runs that see the listener's
        scope.

        Args:
            points: the hook points.
            listener: attached at sites with a tap, and at sites with other users, who may change
                the activation.
            keep: called with the tensors at all other sites.
        """
        refuse_inside_compiled()
        listening: list[HookPoint] = []
        connected: HookPoint | None = None
        quick = False
        try:
            with self.lock:
                plan = self._plan(points)
                quick = not self._attached or plan.is_free
                self.listening += quick
                for point in plan.others if quick else points:
                    if not point.listeners:
                        self._connect(point, connected)
                        connected = point
                    point.add_listener(listener)
                    listening.append(point)
            with (
                self.calls.counted() if self.calls.modules else nullcontext(),
                plan.attached(keep, listener.scope) if quick else nullcontext(),
            ):
                yield
        finally:
            with self.lock:
                self.listening -= quick
                for point in listening:
                    point.keep_listeners([x for x in point.listeners if x is not listener])
                    if not point.listeners:
                        self._disconnect(point)

    def _plan(self, points: Sequence[HookPoint]) -> ReadingPlan:
        """Return a plan for reading these points: an earlier one that still holds, or a new one."""
        for plan in self._plans:
            if plan.points == points and plan.holds:
                return plan
        plan = ReadingPlan(points, self._homes)
        self._plans.append(plan)
        return plan

    def finder(self, path: str) -> Finder:
        """Return the finder of the module at a path."""
        if path not in self._finders:
            self._finders[path] = Finder(self.model, path)
        return self._finders[path]

    def sources_in(self, stack: str, depth: int) -> tuple[SiteHook, ...]:
        """Return the sites whose tensors the views of a block's points need."""
        with self.lock:
            sources = self._sources.get((stack, depth))
            if sources is None:
                unique: dict[SiteHook, None] = {}
                for point in self._points_in_block(stack, depth):
                    unique.update((self._sites[site], None) for site in point.point.sources)
                sources = self._sources[stack, depth] = tuple(unique)
            return sources

    def elements_of(self, site: Site) -> tuple[SiteHook, ...]:
        """Return the sites of all elements of a module's output or input; empty if there is only
        one.
        """
        with self.lock:
            if not self._siblings:
                for other in self._sites.values():
                    key = other.site.path, other.site.kind
                    self._siblings[key] = (*self._siblings.get(key, ()), other)
            elements = self._siblings.get((site.path, site.kind), ())
        return elements if len(elements) > 1 else ()

    def _connect(self, point: HookPoint, before: HookPoint | None = None) -> None:
        """Attach what a hook point needs; the point `before` it was just connected."""
        if self.calls.modules:
            self.calls.change(1)
        if (home := self._homes[point]) is None:
            self._connect_to_tap(point, before)
        else:
            home.add(point)
        for source in point.point.sources:
            self._sites[source].watch(1)
        self.listening += 1

    def _connect_to_tap(self, point: HookPoint, before: HookPoint | None) -> None:
        """Connect a point to the tap on its module, which may be the tap of the point `before`."""
        site = point.point.site
        with LOCK:  # another bridge around the model may be about to remove its tap
            tap: Tap | None = None
            if before is not None:
                last = before.point.site
                if last.path == site.path and last.kind == site.kind:
                    tap = self._taps[before]
            if tap is None:
                tap = tap_on(site.kind, self.finder(site.path).module)
            shared = None if self.sharing is None else self.sharing.tensor_at(site)
            if shared is not None:
                shared.check_in_place(tap.module)
                tap.shared[str(site.key)] = shared
            self._taps[point] = tap
            tap.connect(str(site.key), point)

    def _disconnect(self, point: HookPoint) -> None:
        self.listening -= 1
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
        """Count a listener that edits: while there is one, direct calls of the model must be
        told apart as passes.
        """
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
        """Connect the points that receive this one's result (`Point.linked`,
        `Point.separate_consumers`).
        """
        separate_consumers: tuple[str, ...] = ()
        if listener.kind in _GRADIENT_KINDS:
            separate_consumers = point.point.separate_consumers
        key = (point, listener.scope)
        if not (point.point.linked or separate_consumers) or key in self._following:
            return
        undo: list[Callable[[], None]] = []
        for follower in point.point.linked:
            takes_over = Listener("leader", LeaderEdit(point.name, follower), listener.scope)
            other = self.points[follower.name]
            self.add(other, takes_over, prepend=True)
            undo.append(partial(self.remove, other, (takes_over,)))
        sites = [self.points[name].point.site for name in separate_consumers]
        fused = len(set(sites)) < len(sites)
        for name, site in zip(separate_consumers, sites, strict=True):
            hook = self._site(site if fused else Site(site.path, "input"))
            undo.append(hook.claim(self.points[name]))
        self._following[key] = undo

    def _disconnect_followers(self, point: HookPoint) -> None:
        kinds = _GRADIENT_KINDS if point.point.separate_consumers else _EDITING_KINDS
        needed = {listener.scope for listener in point.listeners if listener.kind in kinds}
        for key in list(self._following):
            leader, scope = key
            if leader is point and scope not in needed:
                for undo in self._following.pop(key):
                    undo()

    def _points_in_block(self, stack: str, depth: int) -> list[HookPoint]:
        if not self._by_block:
            for hook in self.points.values():
                self._by_block.setdefault((hook.point.stack, hook.point.depth), []).append(hook)
        return self._by_block.get((stack, depth), [])


#: The listeners that are given gradients.
_GRADIENT_KINDS = ("bwd", "edge")
#: The listeners that may change activations or gradients.
_EDITING_KINDS = (*_GRADIENT_KINDS, "fwd", "follow", "leader")


def finders_at(model: nn.Module, paths: Iterable[str]) -> list[Finder]:
    """Return the finder of each module at some paths, once for each path."""
    return [Finder(model, path) for path in dict.fromkeys(paths)]


# --------------------------------------------------------------------------------------------------
# The tap for each kind of site other than a module's input or output.
# --------------------------------------------------------------------------------------------------


#: The tap for each kind of site other than a module's input or output, or the watch of such a tap
#: on a call.
TAPS: dict[str, type[Tap] | type[CallWatch]] = {
    "attention": AttentionTap,
    "softmax": AttentionTap,
    "experts": ExpertsWatch,
    "batched experts": BatchedExpertsWatch,
    "router": RouterWatch,
    "recurrence": MixerWatch,
}


def tap_on(kind: str, module: nn.Module) -> Tap:
    """Return the tap of this kind on a module: another bridge's, or a new one."""
    module = holder_of_parameters(module)
    present, new = module.__dict__.get("forward"), TAPS[kind]
    if isinstance(present, Tap) and new in (type(present), present.watch):
        return present
    return new(module) if issubclass(new, Tap) else Tap(module, new)


# --------------------------------------------------------------------------------------------------
# Hook points that cannot be combined in one run.
# --------------------------------------------------------------------------------------------------


def check_clash(
    point: HookPoint, listener: Listener, in_block: Callable[[], Iterable[HookPoint]]
) -> None:
    """Reject hooks that one run cannot combine.

    Args:
        point: the hook point.
        listener: the listener to attach.
        in_block: the hook points of the same block.

    Raises:
        ValueError: gradients are requested at the norm that all heads share, in a run in which
            heads have separate inputs, or with hooks at a module between the two.
    """
    check_between(point, listener, in_block)
    takes_gradients = bool(point.point.separate_consumers) and listener.kind in _GRADIENT_KINDS
    if not (takes_gradients or _separates_inputs(point)):
        return
    visible = CURRENT.get().visible
    kinds = _EDITING_KINDS if takes_gradients else _GRADIENT_KINDS
    for other in in_block():
        if not (_separates_inputs(other) if takes_gradients else other.point.separate_consumers):
            continue
        for x in other.listeners:
            if x.kind in kinds and (x.scope is listener.scope or x.scope in visible):
                raise ValueError(
                    f"{point.name} and {other.name} cannot be used together: with hooks at the one"
                    " each head reads an input of its own, and then the gradient at the other,"
                    " which all heads share, means nothing. Use two runs. (A filter is asked about"
                    " every hook point: let it leave out names with attn_in and _input. For a cache"
                    " of everything, switch set_use_split_qkv_input and set_use_attn_in off.)"
                )


def check_between(
    point: HookPoint, listener: Listener, in_block: Callable[[], Iterable[HookPoint]]
) -> None:
    """Reject gradients at a norm that is read separately (see `Point.separate_consumers`), in a run
    with hooks at a module between the norm and its readers: copies would pass by these hooks.

    Args:
        point, listener, in_block: as for `check_clash`.

    Raises:
        ValueError: one run would have both.
    """
    visible = CURRENT.get().visible
    for other in in_block():
        norm, between = (other, point) if other.point.separate_consumers else (point, other)
        readers = [hook for hook in in_block() if hook.name in norm.point.separate_consumers]
        last = max((hook.order for hook in readers), default=norm.order)
        if between.point.declared or not norm.order < between.order < last:
            continue
        kinds = _GRADIENT_KINDS if other is norm else _EDITING_KINDS
        own_kinds = _EDITING_KINDS if other is norm else _GRADIENT_KINDS
        clashes = any(
            x.kind in kinds and (x.scope is listener.scope or x.scope in visible)
            for x in other.listeners
        )
        if clashes and listener.kind in own_kinds:
            raise ValueError(
                f"{point.name} and {other.name} cannot be used together: with gradients at"
                f" {norm.name}, queries, keys and values each read their own copy of it, which"
                f" passes by {between.name}. Use two runs"
            )


def _separates_inputs(point: HookPoint) -> bool:
    """Tell whether hooks at a point give each head a separate input."""
    flag = point.point.flag
    return flag in ("use_split_qkv_input", "use_attn_in") and not isinstance(point.view, Branch)


# --------------------------------------------------------------------------------------------------
# The order of hook points after a later insertion.
# --------------------------------------------------------------------------------------------------


def order_behind(points: dict[str, HookPoint], hook: HookPoint, behind: HookPoint | None) -> None:
    """Move a hook point directly after another one and its followers, and renumber all of them.

    It goes before points that receive another point's result, unless it is one of these itself,
    because their contributions come last.

    Args:
        points: the hook points by name, in their order; changed in place.
        hook: the point to move.
        behind: the point after which to put it; None: before all others.
    """
    in_order = [point for point in points.values() if point is not hook]
    followers = {follower.name for point in in_order for follower in point.point.linked}
    before = () if hook.name in followers else followers
    index = 0 if behind is None else in_order.index(behind) + 1
    for point in in_order[index:]:
        if behind is None or not point.name.startswith(f"{behind.name}.") or point.name in before:
            break
        index += 1
    in_order.insert(index, hook)
    points.clear()
    points.update((point.name, point) for point in in_order)
    for order, point in enumerate(in_order):
        point.order = order


# --------------------------------------------------------------------------------------------------
# Taps and sites that a trace keeps ready while the model runs, for later requests of its body.
# --------------------------------------------------------------------------------------------------


class TraceOpenings:
    """Preparations that allow a trace to add hooks while the model runs. Torch checks for hooks
    only once, when a module is called, and a tap wraps its module's forward, so both have to be
    prepared. If a view needs a tensor from elsewhere in its block, that tensor has to be recorded
    before the view is requested.

    Args:
        wiring: the bridge's wiring.
        scope: the scope of the trace.
    """

    def __init__(self, wiring: Wiring, scope: Scope) -> None:
        self._wiring, self._scope = wiring, scope
        self._noticing = [OwnedHook(id(scope), noop_hook, False)]
        self._paths: set[str] = set()
        self._modules: list[nn.Module] = []
        self._taps: list[Tap] = []
        self._watched: dict[SiteHook, None] = {}

    def open(self, path: str) -> None:
        """Allow the scope to add listeners on the modules along a path, and inside them, while they
        run."""
        if path in self._paths:
            return
        wiring = self._wiring
        with wiring.lock:
            modules = wiring.finder(path).modules_on_path
            while path not in self._paths:
                self._paths.add(path)
                module = modules.pop()
                if (
                    type(module).forward is not nn.Module.forward
                ):  # a list of modules is never called
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
        """Keep the tensors at some sites, for views that may be requested later."""
        with self._wiring.lock:
            for site in sites:
                if site not in self._watched:
                    self._watched[site] = None
                    site.watch(1)

    def close(self) -> None:
        """End all watches."""
        with self._wiring.lock:
            remove_all(self._modules, self._noticing * len(self._modules))
            self._modules.clear()
            with LOCK:
                while self._taps:
                    self._taps.pop().close(self._scope)
            while self._watched:
                self._watched.popitem()[0].watch(-1)
            self._paths.clear()
