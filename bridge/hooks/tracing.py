"""Which traces are open in the present context, for the parts of a bridge that show what a trace sees."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor


class OpenTrace(Protocol):
    """A trace, as the parts of a bridge ask it."""

    def part_output(self, part: str) -> Tensor:
        """What a part of the bridge returns."""

    def set_part_output(self, part: str, value: Tensor) -> None:
        """Replaces it."""

    def part_input(self, part: str) -> Tensor:
        """What a part of the bridge is given first."""

    def set_part_input(self, part: str, value: Tensor) -> None:
        """Replaces it."""

    def part_outputs(self, part: str) -> Any:
        """All that its module returns."""

    def part_inputs(self, part: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All that its module is called with."""

    def set_part_inputs(self, part: str, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Replaces it."""


#: The open traces, each with the names of its bridge, which tell bridges apart.
_OPEN: ContextVar[tuple[tuple[object, OpenTrace], ...]] = ContextVar("transformer_bridge_traces", default=())


def opened(names: object, trace: OpenTrace) -> None:
    """Says that a trace is open.

    Args:
        names: the names of its bridge.
        trace: the trace.
    """
    _OPEN.set((*_OPEN.get(), (names, trace)))


def closed(trace: OpenTrace) -> None:
    """Says that it is open no more.

    Args:
        trace: the trace.
    """
    # Not simply what was there before: several may be open, and end in any order.
    _OPEN.set(tuple([entry for entry in _OPEN.get() if entry[1] is not trace]))


def trace_of(names: object, asked: str) -> OpenTrace:
    """The trace that is open on a bridge.

    Args:
        names: the names of the bridge.
        asked: what was asked for, for the error.

    Raises:
        RuntimeError: none is open, or several are.
    """
    found = [trace for owner, trace in _OPEN.get() if owner is names]
    if len(found) == 1:
        return found[0]
    if not found:
        raise RuntimeError(
            f"{asked} is there inside a trace only: with bridge.trace(prompt) as run: ... (a cache of a whole run has "
            "activations by the names of their hook points)"
        )
    raise RuntimeError(
        f"{asked} does not say which of the {len(found)} traces that are open on this bridge is meant: "
        'ask the trace itself, run["blocks.0.hook_resid_post"]'
    )
