"""Inference of a declaration: what plays which part, found in one recorded run, without knowing the family."""

from typing import TYPE_CHECKING

from adapters.imports.lazily import lazily

if TYPE_CHECKING:
    from adapters.automatic import declaration as declaration

__getattr__, __dir__ = lazily(__name__, "declaration")
