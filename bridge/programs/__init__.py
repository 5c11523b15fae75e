"""A run with its hooks as a plain module that can be compiled, exported and served."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.programs import programs as programs

__getattr__, __dir__ = lazily(__name__, "programs")
