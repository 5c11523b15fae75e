"""Edits that are made at every step of a generation: written once, outside of the loop over its steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

#: What an edit does to an activation, in place.
Operation = Callable[[Tensor], None]


class EveryStep:
    """An activation at every step of a generation, to be written to: ``run[name][:, -1] = 0``, ``run[name] += v``.

    Args:
        name: of the hook point.
        record: is given each operation.
        path: which part of the activation this is: one index after the other.
    """

    def __init__(self, name: str, record: Callable[[Operation], None], path: tuple[object, ...] = ()) -> None:
        self._name, self._record, self._path = name, record, path

    def __getitem__(self, index: object) -> EveryStep:
        return EveryStep(self._name, self._record, (*self._path, index))

    def __setitem__(self, index: object, value: Tensor | float | EveryStep) -> None:
        if isinstance(value, EveryStep):
            if value._name != self._name:
                self._no_value("read")
            return  # `run[name][index] += v`, of which the addition is recorded already
        kept = value.clone() if isinstance(value, Tensor) else value
        self._write((*self._path, index), lambda old: kept)

    def assign(self, value: Tensor | float) -> None:
        """Replaces the whole of it."""
        self[...] = value

    def _write(self, path: tuple[object, ...], new: Callable[[Tensor], object]) -> None:
        def write(act: Any) -> None:
            for index in path[:-1]:
                act = act[index]
            act[path[-1]] = new(act[path[-1]])

        self._record(write)

    def _augment(self, change: Callable[[Tensor, object], Tensor], value: object) -> EveryStep:
        kept = value.clone() if isinstance(value, Tensor) else value
        self._write(self._path or (...,), lambda old: change(old, kept))
        return self

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
            def changed(old: Tensor) -> object:
                new = old.clone()
                return getattr(new, method)(*args, **kwargs)

            self._write(self._path or (...,), changed)
            return self

        return call

    def _no_value(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{self._name} cannot be {what} here: outside of the loop over run.steps it stands for every step, and can "
            "only be written to. In the loop, step[name] is the activation of that step"
        )

    def _computed(self, other: object = None) -> EveryStep:
        self._no_value("computed with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _computed

    def __bool__(self) -> bool:
        self._no_value("looked at")

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> NoReturn:
        given = next((x for x in args if isinstance(x, cls)), None)
        if given is None:
            raise RuntimeError(f"{getattr(func, '__name__', func)} was given an activation of every step")
        given._no_value(f"given to {getattr(func, '__name__', func)}")


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
