"""Tracing: a forward pass that pauses where Python code reads an activation."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.trace import access as access
    from bridge.trace import edit as edit
    from bridge.trace import generation as generation
    from bridge.trace import stops as stops
    from bridge.trace import trace as trace

__getattr__, __dir__ = lazily(__name__, "access", "edit", "generation", "stops", "trace")
