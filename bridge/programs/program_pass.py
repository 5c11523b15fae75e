"""What one pass of a program remembers, where the code at its sites finds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from adapters.points import Site
from bridge.hooks.context import NamedPoint, PassMemory, SourceSite
from bridge.hooks.listener import Listener

#: A function of which nothing more is known.
AnyFunction = Callable[..., Any]


class ProgramPass(PassMemory):
    """A pass of a program, as hook points meet it: what `RunContext` is in a run.

    A run finds its pass in a context variable, which torch.compile cannot trace: this one is found in thread-local
    storage (see `current`).

    Args:
        inputs: the program's declared inputs.

    Attributes:
        kept: the captured activations, by canonical name.
        sources: what passed the sites that views elsewhere need: the module called there, the tensor.
        asking: a user's function is being called: what it computes is not the model's.
    """

    __slots__ = ("in_user_function", "inputs", "kept", "sources")

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.kept: dict[str, Tensor] = {}
        self.sources: dict[Site, tuple[nn.Module, Tensor]] = {}
        self.in_user_function = False

    @property
    def run(self) -> ProgramPass:
        """What it remembers."""
        return self

    def tensor_at(self, source: SourceSite) -> tuple[nn.Module, Tensor] | None:
        """What passed a site: the module called there, and the tensor; None where nothing did."""
        return self.sources.get(source.site)

    def show(self, listener: Listener, act: Tensor, point: NamedPoint) -> None:
        """Captures an activation."""
        self.kept[point.name] = act.clone()  # so that nothing which is written into it later is seen

    def call_user_function(self, listener: Listener, given: Tensor, point: NamedPoint) -> Any:
        """What a function of the program returns for a copy of an activation."""
        self.in_user_function = True
        try:
            return listener.fn(given, point, self)
        finally:
            self.in_user_function = False

    def end(self) -> None:
        """The pass is over."""
        for body in self.bodies.values():
            body.end()


def current(here: threading.local) -> ProgramPass:
    """The pass that is under way in this thread.

    Raises:
        RuntimeError: none is: a part of the program was called by itself.
    """
    found: ProgramPass | None = getattr(here, "program_pass", None)
    if found is None:
        raise RuntimeError("a part of a program was called by itself: call the program, or its `generate`")
    return found
