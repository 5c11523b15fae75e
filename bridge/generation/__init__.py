"""Generating text: the model's own ``generate``, with hooks, step by step or as a stream."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.generation import batch as batch
    from bridge.generation import generation as generation
    from bridge.generation import options as options

__getattr__, __dir__ = lazily(__name__, "batch", "generation", "options")
