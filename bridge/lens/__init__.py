"""Lenses: the residual stream of each layer read as next tokens, raw, through the final norm, or tuned."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.lens.lens import Reading, Top, lens
    from bridge.lens.tuned import TunedLens

__all__ = ["Reading", "Top", "TunedLens", "lens"]

__getattr__, __dir__ = lazily(__name__, Reading="lens", Top="lens", TunedLens="tuned", lens="lens")
