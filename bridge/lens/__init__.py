"""Lenses: the residual stream of each layer read as next tokens, raw, through the final norm, or tuned."""

from typing import TYPE_CHECKING

from adapters.imports.lazily import lazily

if TYPE_CHECKING:
    from bridge.lens.read import lens
    from bridge.lens.reading import Reading, Top
    from bridge.lens.tuned import TunedLens

__all__ = ["Reading", "Top", "TunedLens", "lens"]

__getattr__, __dir__ = lazily(__name__, Reading="reading", Top="reading", TunedLens="tuned", lens="read")
