"""What a module is called with: the names of its arguments, and which of them is the first tensor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


@functools.cache
def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a forward function takes, in order, without the module itself."""
    return tuple(inspect.signature(forward).parameters)[1:]


def place_of_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Where the first tensor stands that a module is called with: its place among `args`, or its name among `kwargs`.

    None where there is none.

    Args:
        module: which is called.
        args, kwargs: with these.
    """
    if args and isinstance(args[0], Tensor):
        return 0
    place = next((place for place, x in enumerate(args) if isinstance(x, Tensor)), None)
    if place is not None:
        return place
    names = (*names_of(type(module).forward), *kwargs)
    return next((name for name in names if isinstance(kwargs.get(name), Tensor)), None)
