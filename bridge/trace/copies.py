"""Copies of what modules are given and return, and whether anything in a copy was changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import ModelOutput

from bridge.hooks.results import changed_in_place, version_of
from bridge.trace.errors import LateEditError


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor in it changed; what is neither tensor nor container stays what it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, change) for item in value])
    if type(value) in (tuple, list):
        return type(value)([mapped(item, change) for item in value])
    if type(value) is dict:
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, ModelOutput):
        return type(value)(**{name: mapped(item, change) for name, item in value.items()})
    return value


def leaves(value: Any) -> Iterator[Any]:
    """What stands in a structure, in order."""
    if isinstance(value, dict | ModelOutput):
        for name, item in value.items():
            yield name
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


class EditableCopy:
    """A copy of a structure that a user may change.

    Args:
        original: the structure.

    Attributes:
        given: the copy.
    """

    def __init__(self, original: Any) -> None:
        self.given = mapped(original, Tensor.clone)
        self._seen = [(leaf, version_of(leaf) if isinstance(leaf, Tensor) else 0) for leaf in leaves(self.given)]

    @property
    def changed(self) -> bool:
        """Whether anything in it was changed or exchanged, or takes part in a graph."""
        now = list(leaves(self.given))
        if len(now) != len(self._seen):
            return True
        for leaf, (before, version) in zip(now, self._seen, strict=True):
            if leaf is not before:
                return True
            if isinstance(leaf, Tensor) and (leaf.requires_grad or changed_in_place(leaf, version)):
                return True
        return False


class LateEditGuard:
    """Values that the model has used already, none of which is kept alive: a change of them comes too late."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int, str]] = []
        # A tensor of inference mode does not count its versions.
        self._as_they_were: list[tuple[weakref.ref[Tensor], str]] = []
        self._copies: WeakTensorKeyDictionary | None = None

    def add(self, value: Tensor, name: str) -> None:
        """The model uses a value as it is now.

        Args:
            value: what the user may hold.
            name: where it was shown.
        """
        if not value.is_inference():
            self._counters.append((_counter_of(value), value._version, name))
            return
        if self._copies is None:
            self._copies = WeakTensorKeyDictionary()
        self._as_they_were.append((weakref.ref(value), name))
        self._copies[value] = value.clone()

    def check(self) -> None:
        """Looks whether any was changed since.

        Raises:
            LateEditError: one was.
        """
        changed = [name for counter, version, name in self._counters if counter._version != version]
        for ref, name in self._as_they_were:
            value = ref()
            if value is not None and self._copies is not None and not _is_same(value, self._copies[value]):
                changed.append(name)
        for name in changed:
            raise LateEditError(
                f"the value at {name} was changed in place after the model had gone on, which sees nothing of "
                "that: change it before you ask for a later point, or change a copy (value.clone())"
            )

    def forget(self) -> None:
        """What is done to them from now on does not matter."""
        self._counters.clear()
        self._as_they_were.clear()
        self._copies = None


#: For counters of tensors in the CPU's memory: to make one each takes longer than all else here.
_NOTHING = torch.empty(0)


def _counter_of(value: Tensor) -> Tensor:
    """A tensor that counts the versions of another one, of which it holds nothing."""
    if type(value) is not Tensor:
        return value
    counter = value.detach()
    counter.data = _NOTHING if value.is_cpu else value.new_empty(0)
    return counter


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, NaN in the same places."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
