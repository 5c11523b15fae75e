"""What one pass of a program remembers, where the code at its sites finds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from adapters.points import Site

#: A function of which nothing more is known.
AnyFunction = Callable[..., Any]


class EndsWithThePass(Protocol):
    """Something that lasts as long as a pass."""

    def end(self) -> None:
        """The pass is over."""


class OnePass:
    """What one pass remembers.

    Args:
        inputs: the program's declared inputs.

    Attributes:
        kept: the captured activations, by canonical name.
        sources: what passed the sites that views elsewhere need: the module called there, the tensor.
        written: what was written at points that others follow, by name.
        asking: a user's function is being called: what it computes is not the model's.
        bodies: of edits.
    """

    __slots__ = ("asking", "bodies", "inputs", "kept", "sources", "written")

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs
        self.kept: dict[str, Tensor] = {}
        self.sources: dict[Site, tuple[nn.Module, Tensor]] = {}
        self.written: dict[str, Tensor] = {}
        self.asking = False
        self.bodies: dict[object, EndsWithThePass] = {}

    def end(self) -> None:
        """The pass is over."""
        for body in self.bodies.values():
            body.end()


def current(here: threading.local) -> OnePass:
    """The pass that is under way in this thread.

    Raises:
        RuntimeError: none is: a part of the program was called by itself.
    """
    found: OnePass | None = getattr(here, "one_pass", None)
    if found is None:
        raise RuntimeError("a part of a program was called by itself: call the program, or its `generate`")
    return found
