"""Copies of what modules are given and return, and whether anything in a copy was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from bridge.hooks.listener import changed_in_place, version_of


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


class Copied:
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
