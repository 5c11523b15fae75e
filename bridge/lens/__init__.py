"""Lenses: each layer's residual stream read as next tokens, raw, normed, tuned or by derivatives.

`Lens` is a linear map per layer from the stream there to the last one: the identity (the logit
lens), trained (`TunedLens`), or the mean derivative (`JacobianLens`). `lens` reads a run's streams
with one; a `Lens` itself decodes single vectors, gives tokens' directions, and decomposes a stream
into them.
"""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.lens.jacobian import JacobianLens as JacobianLens
    from bridge.lens.maps import Lens as Lens
    from bridge.lens.reading import Reading as Reading
    from bridge.lens.reading import Top as Top
    from bridge.lens.reading import lens as lens
    from bridge.lens.readout import unembedding_hash as unembedding_hash
    from bridge.lens.sparse import Occupancy as Occupancy
    from bridge.lens.sparse import SparseDecomposition as SparseDecomposition
    from bridge.lens.tuned import TunedLens as TunedLens

__all__ = [
    "JacobianLens",
    "Lens",
    "Occupancy",
    "Reading",
    "SparseDecomposition",
    "Top",
    "TunedLens",
    "lens",
    "unembedding_hash",
]

__getattr__, __dir__ = lazily(
    __name__,
    JacobianLens="jacobian",
    Lens="maps",
    Occupancy="sparse",
    Reading="reading",
    SparseDecomposition="sparse",
    Top="reading",
    TunedLens="tuned",
    lens="reading",
    unembedding_hash="readout",
)
