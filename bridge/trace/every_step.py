"""Edits that are made at every step of a generation: written once, outside of the loop over its steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from bridge.trace.copies import mapped

#: What an edit does to an activation, in place.
Operation = Callable[[Tensor], None]


class EveryStep:
    """An activation at every step of a generation, to be written to: ``run[name][:, -1] = 0``, ``run[name] += v``.

    Args:
        name: of the hook point.
        record: is given each operation.
        path: which part of the activation this is: one index after the other.
        is_written: it comes from an operation that is recorded: to assign it to where it came from is nothing more.
    """

    __slots__ = ("_is_written", "_name", "_path", "_record")

    def __init__(
        self, name: str, record: Callable[[Operation], None], path: tuple[object, ...] = (), is_written: bool = False
    ) -> None:
        self._name, self._record, self._path, self._is_written = name, record, path, is_written

    def __getitem__(self, index: object) -> EveryStep:
        return EveryStep(self._name, self._record, (*self._path, index))

    def __setitem__(self, index: object, value: Tensor | float | EveryStep) -> None:
        if isinstance(value, EveryStep):
            EveryStep(self._name, self._record, (*self._path, index)).assign(value)
            return
        kept = _as_it_is(value)
        self._write((*self._path, index), lambda old: kept)

    def assign(self, value: Tensor | float | EveryStep) -> None:
        """Replaces the whole of it.

        Raises:
            RuntimeError: the value is another activation, or a part of one, which cannot be read here.
        """
        if not isinstance(value, EveryStep):
            self[...] = value
        elif not (value._is_written and value._name == self._name and _are_same(value._path, self._path)):
            value._no_value("read")  # and what may be assigned is `run[name][index] += v`, which is recorded already

    def _write(self, path: tuple[object, ...], new: Callable[[Tensor], object]) -> None:
        *above, last = _as_it_is(path)

        def write(act: Any) -> None:
            for index in above:
                act = act[index]
            act[last] = new(act[last])

        self._record(write)

    def _augment(self, change: Callable[[Tensor, object], Tensor], value: object) -> EveryStep:
        if isinstance(value, EveryStep):
            value._no_value("read")
        kept = _as_it_is(value)
        self._write(self._path or (...,), lambda old: change(old, kept))
        return self._written()

    def _written(self) -> EveryStep:
        return EveryStep(self._name, self._record, self._path, is_written=True)

    def __iadd__(self, value: object) -> EveryStep:  # type: ignore[misc]
        return self._augment(operator.add, value)

    def __isub__(self, value: object) -> EveryStep:  # type: ignore[misc]
        return self._augment(operator.sub, value)

    def __imul__(self, value: object) -> EveryStep:  # type: ignore[misc]
        return self._augment(operator.mul, value)

    def __itruediv__(self, value: object) -> EveryStep:  # type: ignore[misc]
        return self._augment(operator.truediv, value)

    def __getattr__(self, method: str) -> Callable[..., EveryStep]:
        in_place = method.endswith("_") and not method.startswith("_") and hasattr(Tensor, method)
        if not in_place:
            if method.startswith("__"):
                raise AttributeError(method)
            self._no_value(f"asked for its {method}")

        def call(*args: object, **kwargs: object) -> EveryStep:
            for other in (*args, *kwargs.values()):
                if isinstance(other, EveryStep):
                    other._no_value("read")
            kept, named = _as_it_is(args), _as_it_is(kwargs)

            def changed(old: Tensor) -> object:
                new = old.clone()
                return getattr(new, method)(*kept, **named)

            self._write(self._path or (...,), changed)
            return self._written()

        return call

    def _no_value(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{self._name} cannot be {what} here: outside of the loop over run.steps it stands for every step, and can "
            "only be written to. In the loop, step[name] is the activation of that step"
        )

    def _computed(self, other: object = None) -> EveryStep:
        self._no_value("computed with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _computed
    __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _computed

    def _looked_at(self, *other: object) -> NoReturn:
        self._no_value("looked at")

    __bool__ = __len__ = __iter__ = __float__ = __int__ = __eq__ = __ne__ = __contains__ = _looked_at  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> NoReturn:
        given = next((x for x in args if isinstance(x, cls)), None)
        if given is None:
            raise RuntimeError(f"{getattr(func, '__name__', func)} was given an activation of every step")
        given._no_value(f"given to {getattr(func, '__name__', func)}")


def _as_it_is(value: Any) -> Any:
    """A value, or a structure of values, that nobody changes afterwards."""
    return mapped(value, Tensor.clone)


def _are_same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether two paths are the same indices: Python makes both sides of ``x[i] += v`` with the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def apply(operations: list[Operation], act: Tensor, name: str, step: int) -> None:
    """Does the operations, in turn.

    Raises:
        IndexError, RuntimeError: as torch does, with the hook point and the step.
    """
    try:
        for operation in operations:
            operation(act)
    except (IndexError, RuntimeError) as error:
        error.add_note(
            f"This edit of {name} is made at every step; at step {step} the activation has shape {list(act.shape)}. "
            "In the loop over run.steps, step[name] = ... is of one step"
        )
        raise
