"""Infer a declaration from one recorded run, without knowing the model's family."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from adapters.automatic import automatic as automatic

__getattr__, __dir__ = lazily(__name__, "automatic")
