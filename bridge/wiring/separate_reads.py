"""What a gradient at the norm before attention means in HookedTransformer, which runs that norm three times.

Queries, keys and values each read a norm of their own there, so a gradient hook on it sees three gradients, one after
the other. A Hugging Face model runs the norm once. While somebody asks for such gradients
(`Point.separate_consumers` names the readers), each reader is given a copy of its own; nobody else pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from adapters.points import Site
from adapters.views import Call
from bridge.hooks.context import CURRENT, ForwardPass
from bridge.hooks.hook_point import HookPoint


class CopyProvider(Protocol):
    """What a site's torch hook offers here.

    Attributes:
        readers: the hook points that may be given a copy of their own.
    """

    readers: tuple[HookPoint, ...]

    def update(self) -> None:
        """Attaches or detaches the torch hook, as it is needed now."""


def separate_readers(points: Iterable[HookPoint]) -> tuple[str, ...]:
    """The points that read this site one by one, when the present code asks for gradients here."""
    context = CURRENT.get()
    for point in points:
        if point.point.separate_consumers:
            for listener in point.listeners:
                if listener.kind in ("bwd", "edge") and listener.scope in context.visible:
                    return point.point.separate_consumers
    return ()


def read_separately(readers: tuple[str, ...], run: ForwardPass, compute: Callable[[], Tensor]) -> Tensor:
    """Computes the tensor once for each reader, in HookedTransformer's order, so that gradients arrive in its order."""
    copies = {reader: compute() for reader in readers}
    run.separate.update(copies)
    return copies[readers[0]]


def give_own_copy(reader: HookPoint, site: Site, run: ForwardPass, x: Tensor, call: Call) -> Tensor:
    """Gives a reader its copy: at its projection's input, or for its part of a fused projection's output."""
    entered = run.separate.pop(reader.name, None)
    if entered is None:
        return x
    if site.kind == "input":
        return entered
    return reader.view.put(x, reader.view.get(call.module.forward(entered), call), call)


class SeparateReading:
    """A reader's claim to a copy of its own, until it is removed.

    Args:
        claims: the torch hook that hands it over.
        reader: the reader.
    """

    def __init__(self, claims: CopyProvider, reader: HookPoint) -> None:
        self._claims, self._reader = claims, reader
        claims.readers = (*claims.readers, reader)
        claims.update()

    def remove(self) -> None:
        """Gives the claim up."""
        readers = list(self._claims.readers)
        readers.remove(self._reader)
        self._claims.readers = tuple(readers)
        self._claims.update()
