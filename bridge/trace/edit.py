"""A body of a trace as hooks: what was written for one run, for every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from bridge.hooks.context import CURRENT
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Listener
from bridge.hooks.names import Names
from bridge.hooks.results import checked, replaces_activation, version_of
from bridge.trace.copies import LateEditGuard
from bridge.trace.coroutine import Coroutine
from bridge.trace.errors import PointPassedError

_ASSIGNED = Listener("fwd", lambda act, hook: None)


class BodyActivations(Protocol):
    """What a body is given: activations by name, to read and to write."""

    def __getitem__(self, name: str) -> Tensor:
        """The activation at a hook point."""

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Puts a tensor in its place."""


#: The body of a trace as a function.
Body = Callable[[BodyActivations], object]


class EditHook:
    """The hook function at every point of an edit.

    Args:
        edit: the edit.

    Attributes:
        in_run: hooks are told in which run they are (see `Listener`).
    """

    in_run = True

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __repr__(self) -> str:
        return f"EditHook({self.edit!r})"

    def __call__(self, act: Tensor, hook: HookPoint) -> Tensor | None:
        context = CURRENT.get()
        if context.run is None:
            raise RuntimeError(
                f"{hook.name} was reached outside of a forward pass, so the body of the edit cannot keep step: call "
                "the bridge, or the whole model"
            )
        step = None if context.generation is None else context.generation.step
        before = context.run.bodies.get(self.edit)
        if isinstance(before, BodyInStep) and before.step == step:
            return before.visit(hook, act)
        if before is not None:
            before.end()
        body = BodyInStep(self.edit, step)
        context.run.bodies[self.edit] = body
        return body.visit(hook, act)


class Edit(Sequence[tuple[str, EditHook]]):
    """A body as hooks: pairs of a hook point's name and a function, as `hooks` and `run_with_hooks` take them.

    In each forward pass the body runs once, in step with the model, as in a trace.

    Args:
        names: of the bridge.
        body: the body.
        points: the hook points that it asks for.
    """

    def __init__(self, names: Names, body: Body, points: Sequence[HookPoint]) -> None:
        self.names, self.body = names, body
        self.points = tuple(sorted(dict.fromkeys(points), key=lambda hook: hook.order))
        self._specs: tuple[tuple[str, EditHook], ...] = ()
        hook = EditHook(self)
        self._specs = tuple([(point.name, hook) for point in self.points])

    def __repr__(self) -> str:
        name = getattr(self.body, "__name__", repr(self.body))
        return f"Edit({name} at {', '.join(point.name for point in self.points)})"

    def __len__(self) -> int:
        return len(self._specs)

    @overload
    def __getitem__(self, index: int) -> tuple[str, EditHook]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, EditHook]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, EditHook] | Sequence[tuple[str, EditHook]]:
        return self._specs[index]

    def __iter__(self) -> Iterator[tuple[str, EditHook]]:
        return iter(self._specs)


class BodyInStep:
    """The body of an edit in one forward pass.

    Args:
        edit: the edit.
        step: of which step of a generation; None outside of one.
    """

    def __init__(self, edit: Edit, step: int | None) -> None:
        self.edit, self.step = edit, step
        self._coroutine: Coroutine | None = None
        self._waiting: HookPoint | None = None
        self._here: HookPoint | None = None
        self._value: Tensor | None = None
        self._passed: set[HookPoint] = set()
        self._late_edits = LateEditGuard()

    # The model's side.

    def visit(self, hook: HookPoint, act: Tensor) -> Tensor | None:
        """What becomes of an activation: None where the body does not replace it.

        Raises:
            LateEditError: the body changed a value in place with which the model had gone on.
            RuntimeError: the point has come already.
        """
        if hook in self._passed:
            raise RuntimeError(
                f"{hook.name} came twice to {self.edit!r} in one forward pass, whose body runs once: attach it once "
                "(trace_edit makes another of the same body)"
            )
        if self._coroutine is None:
            self._coroutine = Coroutine(self._work)
            self._coroutine.resume()
        new: Tensor | None = None
        if self._waiting is hook:
            given = act.clone()  # what the body holds and what the model holds are two
            self._here, self._value, self._waiting = hook, given, None
            version = version_of(given)
            self._coroutine.resume()
            self._late_edits.check()
            if self._value is given:
                self._late_edits.add(given, hook.name)
                changed = replaces_activation(given, version, act, hook.view, held=True)
            else:
                changed = True
            new = self._value.clone() if changed else None
            self._here = self._value = None
        self._passed.add(hook)
        return new

    def end(self) -> None:
        """The pass is over."""
        if self._coroutine is not None:
            self._coroutine.abandon()

    def _work(self) -> None:
        CURRENT.set(CURRENT.get().outside_the_run())
        self.edit.body(self)

    # The body's side.

    def _reach(self, name: str) -> HookPoint:
        hook = self.edit.names.find(name)
        if hook is self._here:
            return hook
        if hook not in self.edit.points:
            raise ValueError(
                f"the body asks for {hook.name}, which it did not when its points were found: "
                f"{', '.join(point.name for point in self.edit.points)}. Name them all: trace_edit(fn, points=[...])"
            )
        if hook in self._passed:
            at = "" if self._here is None else f": the model is at {self._here.name}"
            raise PointPassedError(f"{hook.name} has passed{at}. Ask for points in the model's order")
        self._waiting = hook
        assert self._coroutine is not None
        self._coroutine.pause()
        return hook

    def __getitem__(self, name: str) -> Tensor:
        self._reach(name)
        assert self._value is not None
        return self._value

    def __setitem__(self, name: str, value: Tensor) -> None:
        hook = self._reach(name)
        assert self._value is not None
        self._value = checked(value, self._value, _ASSIGNED, hook)


class Probe:
    """Notes which hook points a body asks for in a trace.

    Args:
        names: of the bridge.
        run: the trace.
    """

    def __init__(self, names: Names, run: BodyActivations) -> None:
        self._names, self._run = names, run
        self.points: list[HookPoint] = []

    def __getitem__(self, name: str) -> Tensor:
        self.points.append(self._names.find(name))
        return self._run[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.points.append(self._names.find(name))
        self._run[name] = value

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"run.{name} is of a trace; a body that becomes hooks has run[name] and run[name] = x alone", name=name
        )


def points_asked_for(names: Names, body: Body, run: BodyActivations) -> list[HookPoint]:
    """The hook points that a body asks for in a trace.

    Raises:
        ValueError: it asks for none.
    """
    probe = Probe(names, run)
    with torch.no_grad():
        body(probe)
    if not probe.points:
        raise ValueError("the body asks for no hook point, so there is nothing to be done by hooks")
    return probe.points
