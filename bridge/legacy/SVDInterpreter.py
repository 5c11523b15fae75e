"""`SVDInterpreter` as HookedTransformer has it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from bridge.analysis.svd import VECTOR_TYPES
from bridge.analysis.svd import SVDInterpreter as _SVDInterpreter

__all__ = ["OUTPUT_EMBEDDING", "VECTOR_TYPES", "SVDInterpreter"]

#: The weight that singular vectors are read through.
OUTPUT_EMBEDDING = "unembed.W_U"


class SVDInterpreter(_SVDInterpreter):
    """`bridge.analysis.svd.SVDInterpreter`, for which a head of ``"w_in"`` or ``"w_out"`` is no error."""

    def get_singular_vectors(
        self, vector_type: str, layer_index: int, num_vectors: int = 10, head_index: int | None = None
    ) -> Float[Tensor, "d_vocab 1 vector"]:
        """The right singular vectors of a matrix of one layer, each through the unembedding."""
        head = None if vector_type in ("w_in", "w_out") else head_index
        return super().get_singular_vectors(vector_type, layer_index, num_vectors, head)
