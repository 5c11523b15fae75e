"""Singular vectors of a model's weights, read as tokens.

The directions that a matrix writes to the residual stream most strongly, each multiplied with the
unembedding (Millidge and Black 2022, "The Singular Value Decompositions of Transformer Weight
Matrices are Highly Interpretable").
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.analysis import layer_of, refuse_no_sum
from bridge.analysis.layer_outputs import bias_written
from bridge.arguments import CannotBeDoneError, check_choice, heads_shown, refuse_wrong_types
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.weights import FactoredMatrix, at_least_float32, first_weight

__all__ = ["SVDInterpreter"]
VECTOR_TYPES = ("OV", "w_in", "w_out")


class SVDInterpreter:
    """Singular vectors of OV circuits and MLP weights, as logits.

    Args:
        model: the bridge. Its weights are read when vectors are computed.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import SVDInterpreter
        >>> bridge = TransformerBridge.boot_embedded()
        >>> vectors = SVDInterpreter(bridge).get_singular_vectors(
        ...     "OV", layer_index=2, head_index=1, num_vectors=5
        ... )
        >>> vectors.shape == (bridge.cfg.d_vocab, 1, 5)
        True
        >>> likeliest = (
        ...     vectors[:, 0, 0].topk(3).indices
        ... )  # the tokens that the strongest direction raises most
    """

    @refuse_wrong_types
    def __init__(self, model: StudiedBridge) -> None:
        self.model = model
        self.cfg = model.cfg

    @refuse_wrong_types
    def get_singular_vectors(
        self,
        vector_type: str,
        layer_index: int,
        num_vectors: int = 10,
        head_index: int | None = None,
    ) -> Float[Tensor, "d_vocab 1 vector"]:
        """Return the right singular vectors of a matrix of one layer, mapped through the
        unembedding.

        They are unit vectors of the residual stream, by decreasing singular value. Their sign is
        arbitrary, and vectors with close singular values are not unique. The final norm is ignored.

        Args:
            vector_type: ``"OV"``, a head's ``W_V @ W_O``, for the directions it writes; ``"w_in"``,
                for the directions the MLP reads (with the preceding norm's weight, unless that was
                folded in); ``"w_out"``, for the directions the MLP writes.
            layer_index: the block.
            num_vectors: how many, the strongest first.
            head_index: the head, for ``"OV"``.

        Returns:
            Logits, ``[d_vocab, 1, vector]``.

        Raises:
            CannotBeDoneError: (a ValueError) an unknown type; a layer or head that the model lacks;
                no head for ``"OV"``, or a head for another type; or more vectors than the matrix
                has.
            AttributeError: the layer has no such weights (a mixture of experts, a layer without
                MLP).

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.analysis.svd import SVDInterpreter
            >>> bridge = TransformerBridge.boot_embedded()
            >>> SVDInterpreter(bridge).get_singular_vectors("w_out", 0).shape[1:]
            torch.Size([1, 10])
        """
        check_choice("the vector type", vector_type, VECTOR_TYPES, CannotBeDoneError)
        self._check("layer_index", layer_index, self.cfg.n_layers)
        if (head_index is None) is (vector_type == "OV"):
            raise CannotBeDoneError(
                f"head_index is {head_index}; OV needs a head, w_in and w_out have none"
            )
        with torch.no_grad():
            if head_index is not None:
                vectors = self._ov(layer_index, head_index).Vh.mT
            else:
                if vector_type == "w_in":
                    weights = self._w_in(layer_index).mT
                else:
                    weights = self._mlp(layer_index, "W_out")
                vectors = torch.linalg.svd(weights.float(), full_matrices=False).Vh
            if not 0 < num_vectors <= len(vectors):
                raise CannotBeDoneError(
                    f"num_vectors is {num_vectors}; {vector_type} has from 1 to {len(vectors)}"
                )
            return (vectors[:num_vectors].float() @ self.model.W_U.float()).mT.unsqueeze(1)

    def _ov(self, layer: int, head: int) -> FactoredMatrix:
        weights = self.model.weights
        prefix = f"blocks.{layer}.attn"
        # The second name: one matrix for each head of keys and values.
        W_V = first_weight(weights, f"{prefix}.W_V", f"{prefix}._W_V")
        W_O = first_weight(weights, f"{prefix}.W_O")
        self._check("head_index", head, len(W_O))
        return FactoredMatrix(W_V[head * len(W_V) // len(W_O)], W_O[head])

    def _mlp(self, layer: int, name: str) -> Tensor:
        return first_weight(self.model.weights, f"blocks.{layer}.mlp.{name}")

    def _w_in(self, layer: int) -> Tensor:
        w_in = self._mlp(layer, "W_in")
        norm, weights = f"blocks.{layer}.ln2.w", self.model.weights
        return w_in * weights[norm][:, None] if norm in weights.getters else w_in

    @staticmethod
    def _check(name: str, index: int, n: int) -> None:
        if type(index) is not int or not 0 <= index < n:
            # HookedTransformer's words, which programs compare.
            what = name.capitalize().replace("_", " ")
            raise CannotBeDoneError(f"{what} must be between 0 and {n - 1} but got {index}")


# --------------------------------------------------------------------------------------------------
# Composition scores: how much a head reads of an earlier head's output, from the weights.
# --------------------------------------------------------------------------------------------------


@refuse_wrong_types
def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Float[Tensor, "..."]:
    """Compute the Frobenius norm of each matrix product, divided by the product of the two norms.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; the layout is
    HookedTransformer's.

    Args:
        left, right: ``[..., ldim, mdim, rdim]`` each, with `left.rdim` equal to `right.ldim`.
        broadcast_dims: pair every left matrix with every right one; False: broadcast the leading
            axes.

    Returns:
        ``[*leading of left, *leading of right]``, or the broadcast leading axes.

    Raises:
        ValueError: the matrices do not fit.

    Example:
        >>> import torch
        >>> from bridge import FactoredMatrix
        >>> from bridge.analysis.svd import composition_scores
        >>> left, right = (
        ...     FactoredMatrix(torch.randn(n, 6, 2), torch.randn(n, 2, 6)) for n in (3, 5)
        ... )
        >>> composition_scores(left, right).shape
        torch.Size([3, 5])
    """
    if left.rdim != right.ldim:
        raise ValueError(
            f"left is {list(left.shape)} and right {list(right.shape)}: left.rdim must be"
            " right.ldim"
        )
    # The outer factors are orthonormal up to a small triangular one; dropping them preserves all
    # norms.
    inner_left = torch.linalg.qr(at_least_float32(left.A)).R @ at_least_float32(left.B)
    inner_right = at_least_float32(right.A) @ torch.linalg.qr(at_least_float32(right.B).mT).R.mT
    left_norms, right_norms = (x.flatten(-2).norm(dim=-1) for x in (inner_left, inner_right))
    if not broadcast_dims:
        return (inner_left @ inner_right).flatten(-2).norm(dim=-1) / left_norms / right_norms
    norms = _norms_of_all_products(inner_left, inner_right)
    norms = norms.reshape((*left_norms.shape, *right_norms.shape))
    left_norms = left_norms.reshape((*left_norms.shape, *(1,) * right_norms.ndim))
    return norms / left_norms / right_norms


def _norms_of_all_products(first: Tensor, second: Tensor) -> Tensor:
    """Return the Frobenius norm of the product of every first matrix with every second one.

    Args:
        first: ``[*leading, m, d]``.
        second: ``[*leading, d, n]``.

    Returns:
        ``[first, second]``.
    """
    d, n = second.shape[-2:]
    columns = second.reshape(-1, d, n).movedim(0, 1).flatten(1)  # d (second n)
    norms = []
    # One first matrix at a time: all at once would need memory quadratic in the number of heads.
    for matrix in first.reshape(-1, first.shape[-2], d):
        products = (matrix @ columns).unflatten(-1, (-1, n))
        norms.append(products.pow(2).sum((0, 2)).sqrt())
    return torch.stack(norms)


def all_scores(
    OV: FactoredMatrix, QK: FactoredMatrix, mode: str
) -> Float[Tensor, "n_layers n_heads n_layers n_heads"]:
    """Return the composition scores of all pairs of heads; see
    `TransformerBridge.all_composition_scores`.

    Args:
        OV, QK: each head's ``W_V @ W_O`` and ``W_Q @ W_K.T``, ``[n_layers, n_heads, d_model,
        d_model]``.
        mode: ``Q``, ``K`` or ``V``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import all_scores
        >>> bridge = TransformerBridge.boot_embedded()
        >>> all_scores(bridge.OV, bridge.QK, "K").shape
        torch.Size([4, 4, 4, 4])
    """
    check_choice("mode", mode, ("Q", "K", "V"))
    right = OV
    if mode != "V":
        right = QK if mode == "Q" else QK.T
    scores = composition_scores(OV, right)
    layers = torch.arange(len(scores), device=scores.device)
    earlier = layers[:, None, None, None] < layers[None, None, :, None]
    return torch.where(earlier, scores, 0.0)


# --------------------------------------------------------------------------------------------------
# Statistics of a model's weights over all layers: accumulated biases, the names of the heads.
# --------------------------------------------------------------------------------------------------


class Labels(list[str]):
    """A list of names that returns itself when called, because it is a method in HookedTransformer
    and a property in TransformerLens 3.
    """

    def __call__(self) -> Labels:
        return self


def accumulated_bias(
    model: StudiedBridge, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> Float[Tensor, " d_model"]:
    """Return the sum of the output biases of all layers before one; see
    `TransformerBridge.accumulated_bias`.

    Args:
        model: the bridge.
        layer, mlp_input, include_mlp_biases: see there.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import accumulated_bias
        >>> accumulated_bias(TransformerBridge.boot_embedded(), 2).shape
        torch.Size([128])
    """
    layer = layer_of(model, layer, mlp_input)
    refuse_no_sum(model, of_normed=True)
    total = torch.zeros(model.cfg.d_model, device=model.cfg.device, dtype=model.cfg.dtype)
    for index in range(layer + mlp_input):
        parts: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp") if index < layer else ("attn",)
        for part in parts if include_mlp_biases else parts[:1]:
            bias = bias_written(model, index, part)
            total = total if bias is None else total + bias.to(total.device)
    return total


def head_labels(model: StudiedBridge) -> Labels:
    """Return the names of all heads; see `TransformerBridge.all_head_labels`.

    Args:
        model: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import head_labels
        >>> head_labels(TransformerBridge.boot_embedded())[3:6]
        ['L0H3', 'L1H0', 'L1H1']
    """
    hooks = model.hook_dict
    labels = Labels()
    for stack, letter in {"blocks": "", "encoder": "E", "decoder": "D"}.items():
        for layer in range(len(hooks)):
            hook = hooks.get(f"{stack}.{layer}.attn.hook_z")
            if hook is not None:
                n_heads = heads_shown(model.cfg, hook.point.axes)
                labels += [f"{letter}L{layer}H{head}" for head in range(n_heads)]
    return labels
