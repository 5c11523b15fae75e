"""The stops of a forward pass: places where the model waits for the body of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapters.points import module_at
from adapters.views import Args, Kwargs
from adapters.views.values import is_readable, same_bits
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
    mapped,
)
from bridge.wiring.wiring import TraceOpenings, Wiring

# --------------------------------------------------------------------------------------------------
# Places in the model's order, as far as it is known before the run.
#
# Blocks follow each other, and modules come before and after them. Inside a block the declared
# order of hook points may differ from that of the computation (values may be computed before
# queries), so there only the run itself can tell.
# --------------------------------------------------------------------------------------------------


#: A list of blocks and an index in it; outside of blocks, "" and the depth.
OrderGroup = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _PlaceInOrder:
    """A hook point, or a module's input or output, in the model's order.

    Attributes:
        name: the hook point's name, or the module's path and whether it is the input or the output.
        group: the group of hook points that it belongs to (such as a block); None if unknown.
        order: its number among the hook points; for a module, the number of its group.
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
        self._places: dict[HookPoint, _PlaceInOrder] = {}
        for number, name in enumerate(_sort_as_computed(points)):
            hook = points[name]
            self._places[hook] = _PlaceInOrder(name, (hook.point.stack, hook.point.depth), number)
        self._ends: dict[OrderGroup, HookPoint] = {}
        self._by_path: dict[str, _PlaceInOrder] = {}
        self._blocks: dict[int, _PlaceInOrder] = {}
        current: OrderGroup | None = None
        for hook in points.values():
            place = self._places[hook]
            if current is None:
                current = place.group
            elif place.group != current and _is_plain(hook):
                self._ends.setdefault(current, hook)
                current = place.group
            self._by_path.setdefault(hook.point.site.path, place)
            if hook.point.stack in ("blocks", "encoder"):
                self._blocks.setdefault(hook.point.depth, place)

    def are_of(self, points: dict[str, HookPoint]) -> bool:
        """Tell whether the order covers exactly these hook points."""
        return points is self._points and len(points) == self.total

    def place(self, hook: HookPoint) -> _PlaceInOrder:
        """Return the place of a hook point."""
        return self._places[hook]

    def end(self, group: OrderGroup | None) -> HookPoint | None:
        """Return the first plain hook point after a group; None if there is none."""
        return None if group is None else self._ends.get(group)

    def block(self, layer: int) -> _PlaceInOrder | None:
        """Return the place where a block of the first list begins."""
        return self._blocks.get(layer)

    def module_place(self, path: str, what: str) -> _PlaceInOrder:
        """Return the place of a module's input or output: that of its block."""
        ancestor = path
        while ancestor:
            near = self._by_path.get(ancestor)
            if near is not None:
                in_block = near.group is not None and near.group[0]
                if in_block or ancestor == path:
                    return _PlaceInOrder(f"{path}.{what}", near.group, near.order)
            ancestor = ancestor.rpartition(".")[0]
        return _PlaceInOrder(f"{path or 'the model'}.{what}", None, -1)


def _sort_as_computed(points: Iterable[str]) -> list[str]:
    """Return the names in the order of the computation, which may differ from the order of
    declaration.

    Norms of queries and keys come after their inputs, and a mixer's inputs before the rest of it.
    """
    numbers = {name: number for number, name in enumerate(points)}
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for name, number in numbers.items():
        owner, _, end = name.rpartition(".")
        last[name] = number
        first.setdefault(owner, number)
        if end == "hook_in":  # of a projection: declared after its output
            parent, _, projection = owner.rpartition(".")
            last[f"{parent}.hook_{projection}"] = number

    def position(name: str) -> float:
        owner, _, end = name.rpartition(".")
        parent, _, module = owner.rpartition(".")
        if module in ("q_norm", "k_norm"):
            return last.get(f"{parent}.hook_{module[0]}", numbers[name]) + 0.5
        if module == "mixer" and parent and end.startswith("hook_in_proj"):
            return first[owner] - 0.5
        return numbers[name]

    return sorted(numbers, key=position)


def has_passed(place: _PlaceInOrder, here: _PlaceInOrder) -> bool:
    """Tell whether the model has definitely passed one place when it is at another."""
    known = place.group is not None and here.group is not None and place.group != here.group
    return known and place.order < here.order


def _is_plain(hook: HookPoint) -> bool:
    if hook.view.contextual or hook.point.sources:
        return False
    return hook.point.site.kind in ("input", "output")


@dataclass(frozen=True, eq=False)
class PointPart:
    """Some heads, queries or keys of a hook point, as requested in a trace.

    Attributes:
        hook: the hook point.
        chosen: the indices by axis, under `Touching`'s argument names.
    """

    hook: HookPoint
    chosen: Mapping[str, Any]


#: What a trace requests: a hook point, a part of one, or a module's inputs or output.
Target = HookPoint | PointPart | tuple[str, str]


class _BodyRequest(NamedTuple):
    """A request of the body.

    Attributes:
        target: what it requests.
        place: the target's place.
        line: the line of the body.
    """

    target: Target
    place: _PlaceInOrder
    line: Line


@dataclass(eq=False, slots=True)
class Stop:
    """A place where the model is paused.

    Attributes:
        request: the request that it answers.
        value: the shown value.
        replaced: whether the value was replaced.
    """

    request: _BodyRequest
    value: Any
    replaced: bool = False

    def replace(self, value: Any) -> None:
        """Replace the shown value."""
        self.value, self.replaced = value, True


class Stops:
    """The stops of one model's run.

    Args:
        wiring: the bridge's wiring.
        scope: the scope of the listeners.
        places: the model's order.
        captured: the hook points whose activations are kept.

    Attributes:
        here: where the model is currently paused; None before its start and after its end.
        kept: the activations of captured points.
        gradients: the gradients computed so far, by hook point name.
        seen: the names of the hook points that were shown with a graph.
        late_edits: the values that were shown and that the model has used since.
    """

    def __init__(
        self, wiring: Wiring, scope: Scope, places: ModelOrder, captured: Iterable[HookPoint]
    ) -> None:
        self._wiring, self._scope, self._places = wiring, scope, places
        self.captured = tuple(captured)
        self.here: Stop | None = None
        self.kept: dict[HookPoint, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.seen: set[str] = set()
        self.coroutine: Coroutine | None = None
        self._waiting: _BodyRequest | None = None
        self._last: _BodyRequest | None = None
        self._points: dict[HookPoint, Listener] = {}
        self._parts: list[tuple[HookPoint, Listener]] = []
        self._handles: dict[tuple[str, str], RemovableHandle] = {}
        self._openings = TraceOpenings(wiring, scope)
        self._ends: dict[HookPoint, Listener] = {}
        self.late_edits = LateEditGuard()

    # The body's side.

    def listen_to_captured(self) -> None:
        """Begin to record captured activations."""
        for hook in self.captured:
            self._listen(hook)

    def has_begun(self, layer: int) -> bool:
        """Tell whether the model has reached a block of the first list."""
        last, block = self._last_request(), self._places.block(layer)
        if last is None:
            return False
        if last.place.group is None:
            return True
        return block is not None and last.place.order >= block.order

    def reach(self, target: Target) -> Stop:
        """Run the model up to the requested place.

        Raises:
            OutOfStepError: the model has passed it, or ended without reaching it.
        """
        assert self.coroutine is not None
        if self.here is not None and self.here.request.target == target:
            return self.here
        place = self._place(target)
        request = _BodyRequest(target, place, calling_line())
        last = self._last_request()
        if self.here is not None:
            _refuse_same_place(request, self.here.request)
        if self.coroutine.finished or (last is not None and has_passed(place, last.place)):
            if target in self.captured and target not in self.kept:
                raise self._never(request, None)
            raise self._passed(request, last)
        self._attach(target)
        in_same_group = last is not None and last.place.group == place.group
        if in_same_group:
            self._listen_to_end(place.group)
        self._waiting = request
        try:
            self.resume()
        finally:
            self._waiting = None
        if self.here is None or self.here.request.target != target:
            if last is not None and in_same_group and place.order < last.place.order:
                raise self._passed(request, last)  # probably: it is in the block of the last one
            raise self._never(request, last)
        return self.here

    def _place(self, target: Target) -> _PlaceInOrder:
        if isinstance(target, tuple):
            return self._places.module_place(*target)
        return self._places.place(target.hook if isinstance(target, PointPart) else target)

    def resume(self) -> None:
        """Run the model up to the next stop, or to its end."""
        assert self.coroutine is not None
        if self.here is not None:
            self._last = self.here.request
        self.coroutine.resume()

    def detach(self) -> None:
        """Detach all listeners, except those for captured activations."""
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

    def _last_request(self) -> _BodyRequest | None:
        """Return the request that the model answered last; None before the first one, and after the
        end of a step.
        """
        return self._last if self.here is None else self.here.request

    def _passed(self, request: _BodyRequest, last: _BodyRequest | None) -> OutOfStepError:
        name = request.place.name
        where = "the model has run to its end"
        if last is not None:
            where = f"the model came to {self._numbered(last.place)} for\n    {last.line}"
        capture = ""
        if name in self._wiring.points:
            capture = f', or name it at the start: trace(..., capture=["{name}"])'
        return OutOfStepError(
            f"{self._numbered(request.place)} has passed: {where}\nand it is asked for only now,"
            f" in\n    {request.line}\nAsk in the model's order{capture}"
        )

    def _never(self, request: _BodyRequest, last: _BodyRequest | None) -> OutOfStepError:
        after, order = " in this run\n", ""
        if last is not None:
            before = self._numbered(last.place)
            after = f" after {before}, which was asked for in\n    {last.line}\n"
            if last.place.group == request.place.group:
                order = "The model may compute it before the other. "
        return OutOfStepError(
            f"{self._numbered(request.place)} never came{after}It was asked for in\n   "
            f" {request.line}\n{order}A block may have been skipped, or this input takes another"
            " way through the model"
        )

    def _numbered(self, place: _PlaceInOrder) -> str:
        if place.order < 0:
            return place.name
        about = "" if place.name in self._wiring.points else "near "
        return f"{place.name} ({about}{place.order + 1} of {self._places.total} points)"

    # Attaching.

    def _attach(self, target: Target) -> None:
        """Listen at a target, unless a listener is already there."""
        if isinstance(target, HookPoint):
            if target not in self._points:
                self._listen(target)
        elif isinstance(target, PointPart):
            touching = Touching(partial(self._on_point, target=target), **target.chosen)
            touching.check_point(target.hook)
            self._listen(target.hook, touching)
        elif target not in self._handles:
            self._handles[target] = self._listen_to_module(target)

    def _listen_to_module(self, target: tuple[str, str]) -> RemovableHandle:
        path, what = target
        self._openings.open(path.rpartition(".")[0] if what == "output" else path)
        group = self._places.module_place(path, what).group
        if group is not None:
            self._openings.watch(self._wiring.sources_in(*group))
        module = module_at(self._wiring.model, path)
        if what == "output":
            return module.register_forward_hook(partial(self._on_output, target))
        on_inputs = partial(self._on_inputs, target)
        return module.register_forward_pre_hook(on_inputs, with_kwargs=True)

    def _listen_to_end(self, group: OrderGroup | None) -> None:
        """Listen after a group, to detect that the model has passed all of it."""
        end = self._places.end(group)
        if end is not None and end not in self._ends:
            self._ends[end] = Listener("read", self._on_end, self._scope)
            self._wiring.add(end, self._ends[end])

    def _listen(self, hook: HookPoint, part: Touching | None = None) -> None:
        site = hook.point.site
        # A module inside which the model may wait must notice hooks that are added while it runs.
        # But if an attention is opened, other listeners may request the whole instead of the part.
        if part is None or site.kind != "attention":
            outside = site.kind == "output"
            self._openings.open(site.path.rpartition(".")[0] if outside else site.path)
        # A block that has run nothing else has nothing pending.
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

    def _pause(self, value: Any, end: _PlaceInOrder | None = None) -> Stop:
        """Pause until the body has had its turn. ``end`` is the place at which it became clear that
        the model missed the request.
        """
        assert self._waiting is not None and self.coroutine is not None
        request, self._waiting = self._waiting, None
        if end is not None:
            request = _BodyRequest(("", ""), end, request.line)
        stop = self.here = Stop(request, value)
        try:
            self.coroutine.pause()
        finally:
            self.here = None
        return stop

    def _on_point(
        self, act: Tensor, hook: HookPoint, target: PointPart | None = None
    ) -> Tensor | None:
        waited_for = self._waiting is not None and self._waiting.target is (target or hook)
        captured = target is None and hook in self.captured
        if not waited_for and not captured:
            return None
        shown = new = act.clone()  # the user's copy and the model's tensor are separate
        version, replaced = version_of(shown), False
        if waited_for:
            stop = self._pause(shown)
            new, replaced = stop.value, stop.replaced
        if new is shown:  # which may have been assigned to itself: run[name] *= 2
            self.late_edits.add(shown, hook.name)
        if replaced:
            new = assigned(new, act, hook).clone()
        if captured:
            self.kept[hook] = new
        if new.requires_grad:
            self._keep_gradient(new, hook.name)
        if replaced:
            return new.clone()
        unchanged = not (changed_in_place(shown, version) or shown.requires_grad)
        if unchanged and shown.is_cpu and is_readable(shown) and same_bits(shown, act):
            return None  # a comparison takes less time than another copy
        if not replaces_activation(shown, version, act, hook.view, held=True):
            return None
        return new.clone()

    def _keep_gradient(self, act: Tensor, name: str) -> None:
        gradients = self.gradients
        self.seen.add(name)

        def keep(gradient: Tensor) -> None:
            before = gradients.get(name)
            gradients[name] = gradient.clone() if before is None else before + gradient

        act.register_hook(keep)

    def _on_output(
        self, target: tuple[str, str], module: nn.Module, args: Args, output: Any
    ) -> Any:
        return self._show(target, output)

    def _on_inputs(
        self, target: tuple[str, str], module: nn.Module, args: Args, kwargs: Kwargs
    ) -> Any:
        return self._show(target, (args, kwargs))

    def _show(self, target: tuple[str, str], value: Any) -> Any:
        """Show the input or output of a module, if the body waits for it; return its replacement,
        or None.
        """
        if self._waiting is None or self._waiting.target != target:
            return None
        if self._scope not in CURRENT.get().visible:
            return None
        shown = mapped(value, Tensor.clone)
        stop = self._pause(shown)
        tensors = [leaf for leaf in leaves(shown) if isinstance(leaf, Tensor)]
        for leaf in leaves(stop.value):
            if any(leaf is tensor for tensor in tensors):
                self.late_edits.add(leaf, stop.request.place.name)
        if stop.replaced:
            return mapped(stop.value, Tensor.clone)
        return mapped(shown, Tensor.clone) if differ(shown, value) else None

    def end_step(self) -> None:
        """End one of several forward passes: pending requests can no longer be met."""
        if self._waiting is not None:
            self._pause(None, _PlaceInOrder("the end of the step", None, -1))
        self.detach()

    def _on_end(self, act: Tensor, hook: HookPoint) -> None:
        place = self._places.place(hook)
        if self._waiting is not None and has_passed(self._waiting.place, place):
            self._pause(None, place)


def _refuse_same_place(request: _BodyRequest, here: _BodyRequest) -> None:
    """Reject a second request for the place where the model is paused.

    Raises:
        OutOfStepError: it is such a request, under another name or for another part.
    """
    place = f"the model is at {here.place.name}, for\n    {here.line}\nand"
    if _share_a_place(request.target, here.target):
        raise OutOfStepError(
            f"{place} {request.place.name} is the same place, asked for in\n    {request.line}\nOne"
            " trace shows it under one of the two"
        )
    of_part = isinstance(request.target, PointPart) or isinstance(here.target, PointPart)
    if of_part and here.place == request.place:
        raise OutOfStepError(
            f"{place} shows it once: ask there for all heads, queries or keys that are needed, or"
            " for the whole"
        )


def _share_a_place(first: Target, second: Target) -> bool:
    """Tell whether one target is a module's input or output and the other a hook point there; torch
    collects the hooks of a place only once.
    """
    for point, module in ((first, second), (second, first)):
        if isinstance(point, HookPoint) and isinstance(module, tuple):
            site = point.point.site
            return site.path == module[0] and module[1] == _SHOWN.get(site.kind)
    return False


#: The attribute of a module that is requested at a site of a kind.
_SHOWN = {"input": "inputs", "output": "output"}
