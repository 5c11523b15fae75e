"""Edits: the body of a trace, written for one run, as hooks for every run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from bridge.hooks.context import CURRENT, HookFunction, RunsWithPass
from bridge.hooks.hooks import HookPoint, replaces_activation, version_of
from bridge.hooks.names import Names
from bridge.interventions.operations import Index
from bridge.trace.coroutine import Coroutine, LateEditGuard, OutOfStepError, assigned, mapped


class BodyActivations:
    """The argument of a body: activations by name, to read and to write."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the activation at a hook point."""
        raise NotImplementedError

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Replace the activation at a hook point."""
        raise NotImplementedError

    def part(
        self, name: str, *, heads: Index = None, queries: Index = None, keys: Index = None
    ) -> Tensor:
        """Return some heads, queries or keys of an activation."""
        raise TypeError(
            f"this body is shown whole activations: run[{name!r}], or a hook with heads=, as"
            " `Touching` makes one"
        )


#: The body of a trace as a function.
TraceBody = Callable[[BodyActivations], object]


class Edit(Sequence[tuple[str, HookFunction]]):
    """A trace body as hooks: pairs of a hook point's name and a function, for `hooks` and
    `run_with_hooks`. The function is this object. In each forward pass the body runs once, in step
    with the model, as in a trace.

    Args:
        names: the bridge's names.
        body: the body.
        points: the hook points that the body requests.

    Attributes:
        in_run: True: the function is part of the run (see `Listener`).
    """

    in_run = True

    def __init__(self, names: Names, body: TraceBody, points: Sequence[HookPoint]) -> None:
        self.names, self.body = names, body
        self.points = tuple(sorted(dict.fromkeys(points), key=lambda hook: hook.order))

    def __repr__(self) -> str:
        name = getattr(self.body, "__name__", repr(self.body))
        return f"Edit({name} at {', '.join(point.name for point in self.points)})"

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, index: int) -> tuple[str, HookFunction]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, HookFunction]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> tuple[str, HookFunction] | Sequence[tuple[str, HookFunction]]:
        return [(point.name, self) for point in self.points][index]

    def find(self, name: str) -> HookPoint:
        """Return one of its hook points.

        Raises:
            UnknownHookError: no hook point has this name.
            ValueError: it is not one of the edit's hook points.
        """
        hook = self.names.find(name)
        if hook not in self.points:
            raise ValueError(
                f"the body asks for {hook.name}, which it did not when its points were found:"
                f" {', '.join(point.name for point in self.points)}. Name them all: trace_edit(fn,"
                " points=[...])"
            )
        return hook

    def __call__(self, act: Tensor, hook: HookPoint) -> Tensor | None:
        """Run the hook function at one of its points."""
        context = CURRENT.get()
        if context.run is None:
            raise RuntimeError(
                f"{hook.name} was reached outside of a forward pass, so the body of the edit cannot"
                " keep step: call the bridge, or the whole model"
            )
        step = None if context.generation is None else context.generation.step
        body = context.run.bodies.get(self)
        if not (isinstance(body, BodyInStep) and body.step == step):
            if body is not None:
                body.end()
            body = context.run.bodies[self] = BodyInStep(self, step)
        return body.visit(hook, act)


class BodyInStep(RunsWithPass, BodyActivations):
    """The body of an edit in one forward pass.

    Args:
        edit: the edit.
        step: the step of the generation; None outside of one.
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
        """Return the body's replacement of an activation; None if it does not replace it.

        Raises:
            OutOfStepError: the body changed a value in place after the model had used it.
            RuntimeError: the point was already visited.
        """
        if hook in self._passed:
            raise RuntimeError(
                f"{hook.name} came twice to {self.edit!r} in one forward pass, whose body runs"
                " once: attach it once (trace_edit makes another of the same body)"
            )
        if self._coroutine is None:
            self._coroutine = Coroutine(self._work)
            self._coroutine.resume()
        new: Tensor | None = None
        if self._waiting is hook:
            shown = act.clone()  # the user's copy and the model's tensor are separate
            self._here, self._value, self._waiting = hook, shown, None
            version = version_of(shown)
            self._coroutine.resume()
            self._late_edits.check()
            changed = True
            if self._value is shown:
                self._late_edits.add(shown, hook.name)
                changed = replaces_activation(shown, version, act, hook.view, held=True)
            new = self._value.clone() if changed else None
            self._here = self._value = None
        self._passed.add(hook)
        return new

    def end(self) -> None:
        """End the pass."""
        if self._coroutine is not None:
            self._coroutine.abandon()

    def _work(self) -> None:
        CURRENT.set(CURRENT.get().outside_the_run())
        self.edit.body(self)

    # The body's side.

    def _reach(self, name: str) -> HookPoint:
        hook = self.edit.find(name)
        if hook is self._here:
            return hook
        if hook in self._passed:
            where = "" if self._here is None else f": the model is at {self._here.name}"
            raise OutOfStepError(
                f"{hook.name} has passed{where}. Ask for points in the model's order"
            )
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
        self._value = assigned(value, self._value, hook)


class _Requests(BodyActivations):
    """A recorder of the hook points that a body requests in a trace.

    Args:
        names: the bridge's names.
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
            f"run.{name} is of a trace; a body that becomes hooks has run[name] and run[name] = x"
            " alone",
            name=name,
        )


def points_asked_for(names: Names, body: TraceBody, run: BodyActivations) -> list[HookPoint]:
    """Return the hook points that a body requests in a trace.

    Raises:
        ValueError: it requests none.
    """
    requests = _Requests(names, run)
    with torch.no_grad():
        body(requests)
    if not requests.points:
        raise ValueError("the body asks for no hook point, so there is nothing to be done by hooks")
    return requests.points


# --------------------------------------------------------------------------------------------------
# Edits at every step of a generation: written once, outside of the loop over its steps.
# --------------------------------------------------------------------------------------------------


#: The operation that an edit applies to an activation, in place.
InPlaceEdit = Callable[[Tensor], None]


class EveryStep:
    """A writable activation at every step of a generation: ``run[name][:, -1] = 0``, ``run[name] +=
    v``.

    Args:
        name: the hook point's name.
        record: receives each operation.
        path: the indices that lead to this part of the activation.
        is_written: whether it is the result of a recorded in-place operation, so that Python's
            assignment back to the same place has nothing to do.
    """

    __slots__ = ("_is_written", "_name", "_path", "_record")

    def __init__(
        self,
        name: str,
        record: Callable[[InPlaceEdit], None],
        path: tuple[object, ...] = (),
        is_written: bool = False,
    ) -> None:
        self._name, self._record, self._path, self._is_written = name, record, path, is_written

    def __getitem__(self, index: object) -> EveryStep:
        return EveryStep(self._name, self._record, (*self._path, index))

    def __setitem__(self, index: object, value: Tensor | float | EveryStep) -> None:
        if isinstance(value, EveryStep):
            EveryStep(self._name, self._record, (*self._path, index)).assign(value)
            return
        kept = _copied(value)
        self._write((*self._path, index), lambda old: kept)

    def assign(self, value: Tensor | float | EveryStep) -> None:
        """Replace the whole activation.

        Raises:
            RuntimeError: the value is another activation, or a part of one, which cannot be read
                here.
        """
        if not isinstance(value, EveryStep):
            self[...] = value
            return
        # The only valid one is `run[name][index] += v`, which is recorded already.
        same_place = value._name == self._name and _are_same(value._path, self._path)
        if not (value._is_written and same_place):
            value._no_value("read")

    def _write(self, path: tuple[object, ...], new: Callable[[Tensor], object]) -> None:
        *above, last = _copied(path)

        def write(act: Any) -> None:
            for index in above:
                act = act[index]
            act[last] = new(act[last])

        self._record(write)

    def _augment(self, change: Callable[[Tensor, object], Tensor], value: object) -> EveryStep:
        if isinstance(value, EveryStep):
            value._no_value("read")
        kept = _copied(value)
        self._write(self._path or (...,), lambda old: change(old, kept))
        return self._written()

    def _written(self) -> EveryStep:
        return EveryStep(self._name, self._record, self._path, is_written=True)

    __iadd__ = partialmethod(_augment, operator.add)
    __isub__ = partialmethod(_augment, operator.sub)
    __imul__ = partialmethod(_augment, operator.mul)
    __itruediv__ = partialmethod(_augment, operator.truediv)

    def __getattr__(self, method: str) -> Callable[..., EveryStep]:
        if method.startswith("__"):
            raise AttributeError(method)
        if method.startswith("_") or not method.endswith("_") or not hasattr(Tensor, method):
            self._no_value(f"asked for its {method}")

        def call(*args: object, **kwargs: object) -> EveryStep:
            for other in (*args, *kwargs.values()):
                if isinstance(other, EveryStep):
                    other._no_value("read")
            kept, named = _copied(args), _copied(kwargs)

            def changed(old: Tensor) -> object:
                new = old.clone()
                return getattr(new, method)(*kept, **named)

            self._write(self._path or (...,), changed)
            return self._written()

        return call

    def _no_value(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{self._name} cannot be {what} here: outside of the loop over run.steps it stands for"
            " every step, and can only be written to. In the loop, step[name] is the activation of"
            " that step"
        )

    def _computed(self, other: object = None) -> EveryStep:
        self._no_value("computed with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _computed
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _computed
    __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _computed

    def _looked_at(self, *other: object) -> NoReturn:
        self._no_value("looked at")

    __bool__ = __len__ = __iter__ = __float__ = __int__ = __eq__ = __ne__ = __contains__ = (
        _looked_at  # type: ignore[assignment]
    )
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> NoReturn:
        name = getattr(func, "__name__", func)
        for x in args:
            if isinstance(x, cls):
                x._no_value(f"given to {name}")
        raise RuntimeError(f"{name} was given an activation of every step")


def _copied(value: Any) -> Any:
    """Return a copy of a value, or a structure of values, that later changes do not affect."""
    return mapped(value, Tensor.clone)


def _are_same(first: tuple[object, ...], second: tuple[object, ...]) -> bool:
    """Tell whether two paths hold identical indices, as both sides of ``x[i] += v`` do in
    Python.
    """
    return len(first) == len(second) and all(map(operator.is_, first, second))


def apply(operations: list[InPlaceEdit], act: Tensor, name: str, step: int) -> None:
    """Apply the operations in turn.

    Raises:
        IndexError, RuntimeError: as torch does, with the hook point and the step.
    """
    try:
        for operation in operations:
            operation(act)
    except (IndexError, RuntimeError) as error:
        error.add_note(
            f"This edit of {name} is made at every step; at step {step} the activation has shape"
            f" {list(act.shape)}. In the loop over run.steps, step[name] = ... is of one step"
        )
        raise
