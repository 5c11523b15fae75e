"""Generating text: the model's own ``generate``, with hooks, step by step or as a stream."""

from typing import TYPE_CHECKING

from adapters.imports.lazily import lazily

if TYPE_CHECKING:
    from bridge.generation import batch as batch
    from bridge.generation import generate as generate
    from bridge.generation import options as options
    from bridge.generation import stream as stream

__getattr__, __dir__ = lazily(__name__, "batch", "generate", "options", "stream")
