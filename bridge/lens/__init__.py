"""Lenses: the residual stream of each layer read as next tokens, raw, through the final norm, or tuned."""

from bridge.lens.read import lens
from bridge.lens.reading import Reading, Top
from bridge.lens.tuned import TunedLens

__all__ = ["Reading", "Top", "TunedLens", "lens"]
