"""Singular vectors of a model's weights, read as tokens.

The directions that a matrix writes to the residual stream most strongly, each multiplied with the unembedding (Millidge
and Black 2022, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable").
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.requirements import AnalysedModel
from bridge.hooks.arguments import check_choice, refuse_wrong_types
from bridge.weights.accessors import first_weight
from bridge.weights.factored_matrix import FactoredMatrix

__all__ = ["SVDInterpreter"]

VECTOR_TYPES = ("OV", "w_in", "w_out")


class SingularVectorError(ValueError, AssertionError):
    """There are no such singular vectors. HookedTransformer's interpreter gives an `AssertionError` there."""


class SVDInterpreter:
    """Singular vectors of OV circuits and MLP weights, as logits.

    Args:
        model: the bridge. Its weights are read when vectors are asked for.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import SVDInterpreter
        >>> bridge = TransformerBridge.boot_embedded()
        >>> vectors = SVDInterpreter(bridge).get_singular_vectors("OV", layer_index=2, head_index=1, num_vectors=5)
        >>> vectors.shape == (bridge.cfg.d_vocab, 1, 5)
        True
        >>> likeliest = vectors[:, 0, 0].topk(3).indices  # the tokens that the strongest direction raises most
    """

    @refuse_wrong_types
    def __init__(self, model: AnalysedModel) -> None:
        self.model = model
        self.cfg = model.cfg

    @refuse_wrong_types
    def get_singular_vectors(
        self, vector_type: str, layer_index: int, num_vectors: int = 10, head_index: int | None = None
    ) -> Float[Tensor, "d_vocab 1 vector"]:
        """The right singular vectors of a matrix of one layer, each through the unembedding.

        They are unit vectors of the residual stream, by falling singular value. Their sign is arbitrary; where singular
        values lie close together, so are they themselves. The final norm is left out.

        Args:
            vector_type: ``"OV"``, a head's ``W_V @ W_O``, and so what it writes; ``"w_in"``, what the MLP reads (with
                the weight of the norm before it, unless that was folded in); ``"w_out"``, what the MLP writes.
            layer_index: the block.
            num_vectors: how many, the strongest first.
            head_index: the head, for ``"OV"``.

        Returns:
            Logits, ``[d_vocab, 1, vector]``.

        Raises:
            SingularVectorError: (a ValueError) an unknown type, a layer or head that the model lacks, no head for
                ``"OV"`` or one for anything else, or more vectors than the matrix has.
            AttributeError: the layer has no such weights (a mixture of experts, a layer without MLP).

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.analysis.svd import SVDInterpreter
            >>> bridge = TransformerBridge.boot_embedded()
            >>> SVDInterpreter(bridge).get_singular_vectors("w_out", 0).shape[1:]
            torch.Size([1, 10])
        """
        check_choice("the vector type", vector_type, VECTOR_TYPES, SingularVectorError)
        self._check("layer_index", layer_index, self.cfg.n_layers)
        if (head_index is None) is (vector_type == "OV"):
            raise SingularVectorError(f"head_index is {head_index}; OV needs a head, w_in and w_out have none")
        with torch.no_grad():
            if head_index is not None:
                vectors = self._ov(layer_index, head_index).Vh.mT
            else:
                weights = self._w_in(layer_index).mT if vector_type == "w_in" else self._mlp(layer_index, "W_out")
                vectors = torch.linalg.svd(weights.float(), full_matrices=False).Vh
            if not 0 < num_vectors <= len(vectors):
                raise SingularVectorError(f"num_vectors is {num_vectors}; {vector_type} has from 1 to {len(vectors)}")
            return (vectors[:num_vectors].float() @ self.model.W_U.float()).mT.unsqueeze(1)

    def _ov(self, layer: int, head: int) -> FactoredMatrix:
        weights, at = self.model.weights, f"blocks.{layer}.attn"
        W_V = first_weight(weights, f"{at}.W_V", f"{at}._W_V")  # the second: one for each head of keys and values
        W_O = first_weight(weights, f"{at}.W_O")
        self._check("head_index", head, len(W_O))
        return FactoredMatrix(W_V[head * len(W_V) // len(W_O)], W_O[head])

    def _mlp(self, layer: int, name: str) -> Tensor:
        return first_weight(self.model.weights, f"blocks.{layer}.mlp.{name}")

    def _w_in(self, layer: int) -> Tensor:
        w_in = self._mlp(layer, "W_in")
        norm = f"blocks.{layer}.ln2.w"
        return w_in * self.model.weights[norm][:, None] if norm in self.model.weights.getters else w_in

    @staticmethod
    def _check(name: str, index: int, n: int) -> None:
        if type(index) is not int or not 0 <= index < n:
            what = name.capitalize().replace("_", " ")  # HookedTransformer's words, which programs compare
            raise SingularVectorError(f"{what} must be between 0 and {n - 1} but got {index}")
