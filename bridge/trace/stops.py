"""The stops of a forward pass: what is asked for is listened to, and the model waits there for what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapters.points import module_at
from adapters.views import Args, Kwargs
from bridge.hooks.context import CURRENT, Listener, Scope
from bridge.hooks.hooks import HookPoint, changed_in_place, replaces_activation, version_of
from bridge.interventions.touching import Touching
from bridge.trace.coroutine import (
    Coroutine,
    LateEditGuard,
    Line,
    OutOfStepError,
    assigned,
    calling_line,
    differ,
    leaves,
    leaves_now,
    mapped,
)
from bridge.wiring.wiring import TraceOpenings, Wiring

# ----------------------------------------------------------------------------------------------------------------------
# Where things are in the model's order, as far as that is known before it runs.
#
# Blocks follow each other, and what comes before and behind them. Inside a block the declared order of hook points is
# not always that of the computation (values may be computed before queries), so there only the run itself can tell.
# ----------------------------------------------------------------------------------------------------------------------


#: A list of blocks and an index in it; of what stands outside of blocks, "" and the depth.
OrderGroup = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PlaceInOrder:
    """A hook point, or a module's input or output, in the model's order.

    Attributes:
        name: of the hook point; or the module's path and what of it.
        group: where it belongs to, None where that is not known.
        order: its number among the hook points; of a module, that of the hook points in its group.
    """

    name: str
    group: OrderGroup | None
    order: int


class ModelOrder:
    """The order of one model's hook points and modules.

    Args:
        points: its hook points by name, in the order of the computation.
    """

    def __init__(self, points: dict[str, HookPoint]) -> None:
        self.total = len(points)
        self._points = points
        self._of = {
            hook: PlaceInOrder(name, order_group(hook), number)
            for number, (name, hook) in enumerate(_as_computed(points))
        }
        self._ends: dict[OrderGroup, HookPoint | None] = {}
        self._by_path: dict[str, PlaceInOrder] = {}
        self._blocks: dict[int, PlaceInOrder] = {}
        before: HookPoint | None = None
        for hook in points.values():
            group = order_group(hook)
            if before is not None and order_group(before) != group and _is_plain(hook):
                self._ends.setdefault(order_group(before), hook)
                before = hook
            elif before is None or order_group(before) == group:
                before = hook
            self._by_path.setdefault(hook.point.site.path, self._of[hook])
            if hook.point.stack in ("blocks", "encoder"):
                self._blocks.setdefault(hook.point.depth, self._of[hook])

    def are_of(self, points: dict[str, HookPoint]) -> bool:
        """Whether they are those of these hook points, all of them."""
        return points is self._points and len(points) == self.total

    def of(self, hook: HookPoint) -> PlaceInOrder:
        """The place of a hook point."""
        return self._of[hook]

    def end_of(self, group: OrderGroup | None) -> HookPoint | None:
        """The first plain hook point behind a group; None where there is none."""
        return None if group is None else self._ends.get(group)

    def block(self, layer: int) -> PlaceInOrder | None:
        """Where a block of the first list begins."""
        return self._blocks.get(layer)

    def of_module(self, path: str, what: str) -> PlaceInOrder:
        """The place of a module's input or output: that of the block it is in."""
        inside = path
        while inside:
            near = self._by_path.get(inside)
            if near is not None and ((near.group is not None and near.group[0]) or inside == path):
                return PlaceInOrder(f"{path}.{what}", near.group, near.order)
            inside = inside.rpartition(".")[0]
        return PlaceInOrder(f"{path or 'the model'}.{what}", None, -1)


def order_group(hook: HookPoint) -> OrderGroup:
    """The group of a hook point."""
    return hook.point.stack, hook.point.depth


def _as_computed(points: dict[str, HookPoint]) -> list[tuple[str, HookPoint]]:
    """Hook points in the order of the computation, where that of their declaration is another.

    Norms of queries and keys are behind what they read, and what goes into a mixer before the rest of it.
    """
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, name in enumerate(points):
        part, _, end = name.rpartition(".")
        last[name] = number
        first.setdefault(part, number)
        if end == "hook_in":  # of a projection: declared behind what it makes
            last[f"{part.rpartition('.')[0]}.hook_{part.rpartition('.')[2]}"] = number

    def key(item: tuple[int, tuple[str, HookPoint]]) -> tuple[float, int]:
        number, (name, _) = item
        part, _, end = name.rpartition(".")
        above, _, norm = part.rpartition(".")
        if norm in ("q_norm", "k_norm"):
            return last.get(f"{above}.hook_{norm[0]}", number) + 0.5, number
        if part.endswith(".mixer") and end.startswith("hook_in_proj"):
            return first[part] - 0.5, number
        return number, number

    return [item for _, item in sorted(enumerate(points.items()), key=key)]


def has_passed(wanted: PlaceInOrder, here: PlaceInOrder) -> bool:
    """Whether it is certain that the model has passed a place when it is at another."""
    known = wanted.group is not None and here.group is not None and wanted.group != here.group
    return known and wanted.order < here.order


def _is_plain(hook: HookPoint) -> bool:
    return not (hook.view.contextual or hook.point.sources) and hook.point.site.kind in ("input", "output")


@dataclass(frozen=True, eq=False)
class PointPart:
    """Some heads, queries or keys of a hook point, as a trace is asked for them.

    Attributes:
        hook: the hook point.
        chosen: of its axes, by what `Touching` calls them.
    """

    hook: HookPoint
    chosen: Mapping[str, Any]


#: What a trace can be asked for: a hook point, or a part of one, or a module's inputs or output.
Asked = HookPoint | PointPart | tuple[str, str]


@dataclass(eq=False, slots=True)
class Stop:
    """One place where the model waits.

    Attributes:
        asked: what was asked for.
        place: where that is.
        line: where it was asked for.
        value: what is shown.
        replaced: something was put in its place.
    """

    asked: Asked | None
    place: PlaceInOrder
    line: Line
    value: Any
    replaced: bool = False

    def replace(self, value: Any) -> None:
        """Puts something in the place of what is shown."""
        self.value, self.replaced = value, True


class Stops:
    """The stops of one model's run.

    Args:
        wiring: of the bridge.
        scope: what the listeners belong to.
        places: the model's order.
        captured: the hook points whose activations are kept.

    Attributes:
        here: where the model waits now; None before it began and after it ended.
        kept: the activations of captured points.
        gradients: the gradients that came, by the name of the hook point.
        seen: the names of the hook points that were shown with a graph.
        late_edits: the values that were shown and that the model has used since.
    """

    def __init__(self, wiring: Wiring, scope: Scope, places: ModelOrder, captured: Iterable[HookPoint]) -> None:
        self._wiring, self._scope, self._places = wiring, scope, places
        self.captured = tuple(captured)
        self.here: Stop | None = None
        self.kept: dict[HookPoint, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.seen: set[str] = set()
        self.coroutine: Coroutine | None = None
        self._waiting: tuple[Asked, PlaceInOrder, Line] | None = None
        self._last: tuple[PlaceInOrder, Line] | None = None
        self._points: dict[HookPoint, Listener] = {}
        self._parts: list[tuple[HookPoint, Listener]] = []
        self._handles: dict[tuple[str, str], RemovableHandle] = {}
        self._openings = TraceOpenings(wiring, scope)
        self._ends: dict[HookPoint, Listener] = {}
        self.late_edits = LateEditGuard()

    # The body's side.

    def listen_to_captured(self) -> None:
        """Begins to keep what is captured."""
        for hook in self.captured:
            self._listen(hook)

    def has_begun(self, layer: int) -> bool:
        """Whether the model has come to a block of the first list."""
        at = self._at()
        block = self._places.block(layer)
        return at is not None and (at[0].group is None or (block is not None and at[0].order >= block.order))

    def reach(self, asked: Asked) -> Stop:
        """Lets the model go on to what is asked for.

        Raises:
            OutOfStepError: it has passed, or the model ended without coming to it.
        """
        assert self.coroutine is not None
        if self.here is not None and self.here.asked == asked:
            return self.here
        hook = asked.hook if isinstance(asked, PointPart) else asked
        place = self._places.of(hook) if isinstance(hook, HookPoint) else self._places.of_module(*hook)
        line = calling_line()
        at = self._at()
        if self.here is not None and _share_a_place(asked, self.here.asked):
            raise OutOfStepError(
                f"the model is at {self.here.place.name}, for\n    {self.here.line}\n"
                f"and {place.name} is the same place, asked for in\n    {line}\nOne trace shows it under one of the two"
            )
        if self.here is not None and PointPart in map(type, (asked, self.here.asked)) and self.here.place == place:
            raise OutOfStepError(
                f"the model is at {self.here.place.name}, for\n    {self.here.line}\nand shows it once: ask there for "
                "all heads, queries or keys that are needed, or for the whole"
            )
        if self.coroutine.finished or (at is not None and has_passed(place, at[0])):
            missed = asked in self.captured and asked not in self.kept
            raise self._never(place, line, None) if missed else self._passed(place, line, at)
        self._attach(asked, place if at is not None and at[0].group == place.group else None)
        self._waiting = (asked, place, line)
        try:
            self.resume()
        finally:
            self._waiting = None
        if self.here is None or self.here.asked != asked:
            raise self._passed(place, line, at) if self._may_have_passed(at, place) else self._never(place, line, at)
        return self.here

    def resume(self) -> None:
        """Lets the model go on to the next stop, or to its end."""
        assert self.coroutine is not None
        if self.here is not None:
            self._last = (self.here.place, self.here.line)
        self.coroutine.resume()

    def detach(self) -> None:
        """Listens to nothing any more, but to what is captured."""
        for hook, listener in (*self._points.items(), *self._parts, *self._ends.items()):
            self._wiring.remove(hook, (listener,))
        for handle in self._handles.values():
            handle.remove()
        self._openings.close()
        self._points.clear()
        self._parts.clear()
        self._ends.clear()
        self._handles.clear()
        self.here = self._last = None

    def _at(self) -> tuple[PlaceInOrder, Line] | None:
        return self._last if self.here is None else (self.here.place, self.here.line)

    def _may_have_passed(self, at: tuple[PlaceInOrder, Line] | None, place: PlaceInOrder) -> bool:
        """Whether what did not come may have passed: in the block where the model was."""
        return at is not None and at[0].group == place.group and place.order < at[0].order

    def _passed(self, place: PlaceInOrder, line: Line, at: tuple[PlaceInOrder, Line] | None) -> OutOfStepError:
        where = "the model has run to its end"
        if at is not None:
            where = f"the model came to {self._numbered(at[0])} for\n    {at[1]}"
        known = place.name in self._wiring.points
        capture = f', or name it at the start: trace(..., capture=["{place.name}"])' if known else ""
        return OutOfStepError(
            f"{self._numbered(place)} has passed: {where}\nand it is asked for only now, in\n    {line}\n"
            f"Ask in the model's order{capture}"
        )

    def _never(self, place: PlaceInOrder, line: Line, at: tuple[PlaceInOrder, Line] | None) -> OutOfStepError:
        after = (
            " in this run\n" if at is None else f" after {self._numbered(at[0])}, which was asked for in\n    {at[1]}\n"
        )
        near = at is not None and at[0].group == place.group
        return OutOfStepError(
            f"{self._numbered(place)} never came{after}It was asked for in\n    {line}\n"
            + ("The model may compute it before the other. " if near else "")
            + "A block may have been skipped, or this input takes another way through the model"
        )

    def _numbered(self, place: PlaceInOrder) -> str:
        if place.order < 0:
            return place.name
        about = "" if place.name in self._wiring.points else "near "
        return f"{place.name} ({about}{place.order + 1} of {self._places.total} points)"

    # Attaching.

    def _attach(self, asked: Asked, near: PlaceInOrder | None) -> None:
        """Listens to what is asked for, and where it may have passed, also to what would show that."""
        if isinstance(asked, HookPoint):
            if asked not in self._points:
                self._listen(asked)
        elif isinstance(asked, PointPart):
            self._listen_to_part(asked)
        elif asked not in self._handles:
            path, what = asked
            self._openings.open(path.rpartition(".")[0] if what == "output" else path)
            group = self._places.of_module(path, what).group
            if group is not None:
                self._openings.watch(self._wiring.sources_in(*group))
            module = module_at(self._wiring.model, path)
            if what == "output":
                self._handles[asked] = module.register_forward_hook(partial(self._on_output, asked))
            else:
                self._handles[asked] = module.register_forward_pre_hook(
                    partial(self._on_inputs, asked), with_kwargs=True
                )
        end = None if near is None else self._places.end_of(near.group)
        if end is not None and end not in self._ends:
            self._ends[end] = Listener("read", self._on_end, self._scope)
            self._wiring.add(end, self._ends[end])

    def _listen_to_part(self, asked: PointPart) -> None:
        touching = Touching(partial(self._on_point, asked=asked), **asked.chosen)
        touching.check_point(asked.hook)
        # Inside of an attention that is opened, others may ask for the whole.
        self._listen(asked.hook, touching, opens=asked.hook.point.site.kind != "attention")

    def _listen(self, hook: HookPoint, part: Touching | None = None, opens: bool = True) -> None:
        site = hook.point.site
        # A module inside which the model may wait has to take notice of hooks that come while it runs.
        inside = site.kind != "output"
        if opens:
            self._openings.open(site.path if inside else site.path.rpartition(".")[0])
        # Of a block that has run nothing else is to come.
        if not (site.kind == "output" and hook.name.endswith(".hook_resid_post")):
            self._openings.watch(self._wiring.sources_in(hook.point.stack, hook.point.depth))
        self._openings.watch(self._wiring.elements_of(site))
        listener = Listener("follow", part or self._on_point, self._scope)
        if part is None:
            self._points[hook] = listener
        else:
            self._parts.append((hook, listener))
        self._wiring.add(hook, listener)

    # The model's side.

    def _stop_at(self, value: Any, end: PlaceInOrder | None = None) -> Stop:
        """Waits until the body has had its turn; at an end behind which what it waits for does not come."""
        assert self._waiting is not None and self.coroutine is not None
        asked, place, line = self._waiting
        stop = self.here = Stop(asked, place, line, value) if end is None else Stop(("", ""), end, line, value)
        self._waiting = None
        try:
            self.coroutine.pause()
        finally:
            self.here = None
        return stop

    def _on_point(self, act: Tensor, hook: HookPoint, asked: PointPart | None = None) -> Tensor | None:
        waited_for = self._waiting is not None and self._waiting[0] is (asked or hook)
        captured = asked is None and hook in self.captured
        if not waited_for and not captured:
            return None
        given = new = act.clone()  # what the user holds and what the model holds are two
        version, replaced = version_of(given), False
        if waited_for:
            stop = self._stop_at(given)
            new, replaced = stop.value, stop.replaced
        if new is given:  # which may have been assigned to itself: run[name] *= 2
            self.late_edits.add(given, hook.name)
        if replaced:
            new = assigned(new, act, hook).clone()
        if captured:
            self.kept[hook] = new
        if new.requires_grad:
            self._keep_gradient(new, hook.name)
        unchanged = not (replaced or changed_in_place(given, version) or given.requires_grad)
        if unchanged and given.is_cpu and torch.equal(given, act):
            return None  # to compare takes less time than another copy
        if not (replaced or replaces_activation(given, version, act, hook.view, held=True)):
            return None
        return new.clone()

    def _keep_gradient(self, act: Tensor, name: str) -> None:
        gradients = self.gradients
        self.seen.add(name)

        def keep(gradient: Tensor) -> None:
            before = gradients.get(name)
            gradients[name] = gradient.clone() if before is None else before + gradient

        act.register_hook(keep)

    def _is_awaited(self, asked: Asked) -> bool:
        return self._waiting is not None and self._waiting[0] == asked and self._scope in CURRENT.get().visible

    def _on_output(self, asked: tuple[str, str], module: nn.Module, args: Args, output: Any) -> Any:
        return self._show(output) if self._is_awaited(asked) else None

    def _on_inputs(self, asked: tuple[str, str], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if not self._is_awaited(asked):
            return None
        return self._show((args, kwargs))

    def _show(self, value: Any) -> Any:
        """Shows what a module is given or returns; what it is to be instead, or None."""
        given = mapped(value, Tensor.clone)
        before = leaves_now(given)
        stop = self._stop_at(given)
        shown = [leaf for leaf in leaves(given) if isinstance(leaf, Tensor)]
        for leaf in leaves(stop.value):
            if any(leaf is other for other in shown):
                self.late_edits.add(leaf, stop.place.name)
        if stop.replaced:
            return mapped(stop.value, Tensor.clone)
        return mapped(given, Tensor.clone) if differ(given, before) else None

    def end_step(self) -> None:
        """Called where one forward pass of several ends: what is still waited for never came."""
        if self._waiting is not None:
            self._stop_at(None, PlaceInOrder("the end of the step", None, -1))
        self.detach()

    def _on_end(self, act: Tensor, hook: HookPoint) -> None:
        if self._waiting is not None and has_passed(self._waiting[1], self._places.of(hook)):
            self._stop_at(None, self._places.of(hook))


def _share_a_place(one: Asked, other: Asked | None) -> bool:
    """Whether a hook point and a module's input or output are at one place: torch looks for hooks there only once."""
    for point, module in ((one, other), (other, one)):
        if isinstance(point, HookPoint) and isinstance(module, tuple):
            site = point.point.site
            return site.path == module[0] and module[1] == _SHOWN.get(site.kind)
    return False


#: What of a module is asked for at a site of a kind.
_SHOWN = {"input": "inputs", "output": "output"}
