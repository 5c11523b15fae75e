"""`patching` and `SVDInterpreter` as in HookedTransformer, and the `tools` of TransformerLens 4.

The names of `tools` are not available; each error names the corresponding study of the bridge.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from bridge.analysis.svd import VECTOR_TYPES
from bridge.analysis.svd import SVDInterpreter as _SVDInterpreter
from bridge.legacy.table import named
from bridge.patching import *  # noqa: F403
from bridge.patching import __all__ as _PATCHING

__all__ = ["OUTPUT_EMBEDDING", "VECTOR_TYPES", "SVDInterpreter", *_PATCHING]
__getattr__ = named(__name__)

#: Placeholders for annotations: a model's output, activations, and the axes of a patching table.
Logits = Tensor
CorruptedActivation = Tensor
PatchedActivation = Tensor
AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]
#: The weights whose singular vectors are read through the unembedding.
OUTPUT_EMBEDDING = "unembed.W_U"


class SVDInterpreter(_SVDInterpreter):
    """`bridge.analysis.svd.SVDInterpreter` that ignores the head for ``"w_in"`` and ``"w_out"``."""

    def get_singular_vectors(
        self,
        vector_type: str,
        layer_index: int,
        num_vectors: int = 10,
        head_index: int | None = None,
    ) -> Float[Tensor, "d_vocab 1 vector"]:
        """Return the right singular vectors of a layer's matrix, each projected through the
        unembedding.
        """
        head = None if vector_type in ("w_in", "w_out") else head_index
        return super().get_singular_vectors(vector_type, layer_index, num_vectors, head)
