"""Inference of a declaration: what plays which part, found in one recorded run, without knowing the family."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from adapters.automatic import automatic as automatic

__getattr__, __dir__ = lazily(__name__, "automatic")
