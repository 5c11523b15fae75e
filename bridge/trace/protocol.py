"""What a trace needs of a bridge."""

from __future__ import annotations

from typing import Protocol

from adapters import Architecture
from bridge.generation.prompt import Generates
from bridge.run.protocol import RunnableBridge


class TraceableBridge(RunnableBridge, Protocol):
    """A bridge, as a trace needs it.

    Attributes:
        architecture: what its adapter declares.
    """

    architecture: Architecture


class TraceableGenerator(TraceableBridge, Generates, Protocol):
    """A bridge that generates, as a trace needs it."""
