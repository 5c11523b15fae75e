"""Lenses: each layer's residual stream read as next tokens, raw, normed, tuned or by derivatives.

`Lens` is a linear map per layer from the stream there to the last one: the identity (the logit
lens), trained (`TunedLens`), or the mean derivative (`JacobianLens`). `lens` reads a run's streams
with one; a `Lens` itself decodes single vectors, gives tokens' directions, and decomposes a stream
into them.
"""

from bridge.lens.jacobian import JacobianLens
from bridge.lens.maps import Lens
from bridge.lens.reading import Reading, Top, lens
from bridge.lens.readout import unembedding_hash
from bridge.lens.sparse import Occupancy, SparseDecomposition
from bridge.lens.tuned import TunedLens

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
