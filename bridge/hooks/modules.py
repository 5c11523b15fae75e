"""Finding modules by path, and their arguments by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from adapters.paths import call_number, gone, module_path


@functools.cache
def first_parameter(forward: Callable[..., Any]) -> str:
    """The name of a forward function's first parameter after self."""
    return list(inspect.signature(forward).parameters)[1]


class Finder:
    """Finds a module anew each time, since users replace modules (LoRA, wrappers of their own).

    Args:
        root: the model.
        path: dotted, from the model.

    Attributes:
        call: which call of it in a pass is meant, None where it is called once.
    """

    __slots__ = ("call", "parts", "root")

    def __init__(self, root: nn.Module, path: str) -> None:
        self.root, self.call = root, call_number(path)
        self.parts = module_path(path).split(".") if path else []

    @property
    def module(self) -> nn.Module:
        """The module that stands there now.

        Raises:
            RuntimeError: there is none any more.
        """
        found: Any = self.root
        for part in self.parts:
            child = found._modules.get(part)
            found = getattr(found, part, None) if child is None else child
            if found is None:
                raise RuntimeError(gone(".".join(self.parts)))
        return found

    def steps(self) -> Iterator[tuple[dict[str, Any], str, nn.Module | None]]:
        """The steps from the model to the module: the modules among which it was looked for, the name, what was found.

        None stands for a step that led through an attribute.
        """
        found: Any = self.root
        for part in self.parts:
            child = found._modules.get(part)
            yield found._modules, part, child
            found = getattr(found, part) if child is None else child


def check_places(finders: Iterable[Finder]) -> None:
    """Looks whether one module stands at several places, where a hook at one would act at all.

    Raises:
        ValueError: one does.
    """
    places: dict[int, str] = {}
    for finder in finders:
        path = ".".join(finder.parts)
        other = places.setdefault(id(finder.module), path)
        if other != path:
            raise ValueError(
                f"one module stands at {other!r} and at {path!r}: a hook at one place would act at both. Give each "
                "place a module of its own (copy.deepcopy; parameters may be shared)"
            )
