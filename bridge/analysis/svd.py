"""Singular vectors of a model's weights, read as tokens.

The directions that a matrix writes to the residual stream most strongly, each multiplied with the unembedding (Millidge
and Black 2022, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable").
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.analysis import layer_of, refuse_no_sum
from bridge.analysis.layer_outputs import bias_written
from bridge.hooks.arguments import CannotBeDoneError, check_choice, heads_shown, refuse_wrong_types
from bridge.hooks.asked import StudiedBridge
from bridge.weights import FactoredMatrix, at_least_float32, first_weight

__all__ = ["SVDInterpreter"]
VECTOR_TYPES = ("OV", "w_in", "w_out")


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
    def __init__(self, model: StudiedBridge) -> None:
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
            CannotBeDoneError: (a ValueError) an unknown type, a layer or head that the model lacks, no head for
                ``"OV"`` or one for anything else, or more vectors than the matrix has.
            AttributeError: the layer has no such weights (a mixture of experts, a layer without MLP).

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
            raise CannotBeDoneError(f"head_index is {head_index}; OV needs a head, w_in and w_out have none")
        with torch.no_grad():
            if head_index is not None:
                vectors = self._ov(layer_index, head_index).Vh.mT
            else:
                weights = self._w_in(layer_index).mT if vector_type == "w_in" else self._mlp(layer_index, "W_out")
                vectors = torch.linalg.svd(weights.float(), full_matrices=False).Vh
            if not 0 < num_vectors <= len(vectors):
                raise CannotBeDoneError(f"num_vectors is {num_vectors}; {vector_type} has from 1 to {len(vectors)}")
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
            raise CannotBeDoneError(f"{what} must be between 0 and {n - 1} but got {index}")


# ----------------------------------------------------------------------------------------------------------------------
# How much one head reads of what an earlier head writes, from the weights.
# ----------------------------------------------------------------------------------------------------------------------


@refuse_wrong_types
def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Float[Tensor, "..."]:
    """The Frobenius norm of a product, over the product of the norms.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; the layout is HookedTransformer's.

    Args:
        left, right: ``[..., ldim, mdim, rdim]`` each, with `left.rdim` equal to `right.ldim`.
        broadcast_dims: every left matrix with every right one; False: leading axes are broadcast.

    Returns:
        ``[*leading of left, *leading of right]``, or the broadcast leading axes.

    Raises:
        ValueError: the matrices do not fit.

    Example:
        >>> import torch
        >>> from bridge import FactoredMatrix
        >>> from bridge.analysis.svd import composition_scores
        >>> one, other = (FactoredMatrix(torch.randn(n, 6, 2), torch.randn(n, 2, 6)) for n in (3, 5))
        >>> composition_scores(one, other).shape
        torch.Size([3, 5])
    """
    if left.rdim != right.ldim:
        raise ValueError(f"left is {list(left.shape)} and right {list(right.shape)}: left.rdim must be right.ldim")
    # The outer sides are orthonormal, but for a small triangular factor: without them all norms are the same.
    inner_left = torch.linalg.qr(at_least_float32(left.A)).R @ at_least_float32(left.B)
    inner_right = at_least_float32(right.A) @ torch.linalg.qr(at_least_float32(right.B).mT).R.mT
    left_norms, right_norms = (x.flatten(-2).norm(dim=-1) for x in (inner_left, inner_right))
    if not broadcast_dims:
        return (inner_left @ inner_right).flatten(-2).norm(dim=-1) / left_norms / right_norms
    m = inner_right.shape[-1]
    columns = inner_right.reshape(-1, right.ldim, m).movedim(0, 1).flatten(1)  # d (right m)
    rows = inner_left.reshape(-1, inner_left.shape[-2], left.rdim)
    # One left matrix at a time: all at once take as much memory as the square of the number of heads.
    norms = [(matrix @ columns).unflatten(-1, (-1, m)).pow(2).sum((0, 2)).sqrt() for matrix in rows]
    products = torch.stack(norms).reshape((*left_norms.shape, *right_norms.shape))
    return products / left_norms.reshape((*left_norms.shape, *(1,) * right_norms.ndim)) / right_norms


def all_scores(OV: FactoredMatrix, QK: FactoredMatrix, mode: str) -> Float[Tensor, "n_layers n_heads n_layers n_heads"]:
    """The composition scores of all pairs of heads; see `TransformerBridge.all_composition_scores`.

    Args:
        OV, QK: each head's ``W_V @ W_O`` and ``W_Q @ W_K.T``, ``[n_layers, n_heads, d_model, d_model]``.
        mode: ``Q``, ``K`` or ``V``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import all_scores
        >>> bridge = TransformerBridge.boot_embedded()
        >>> all_scores(bridge.OV, bridge.QK, "K").shape
        torch.Size([4, 4, 4, 4])
    """
    check_choice("mode", mode, ("Q", "K", "V"))
    scores = composition_scores(OV, OV if mode == "V" else QK if mode == "Q" else QK.T)
    layers = torch.arange(len(scores), device=scores.device)
    earlier = layers[:, None, None, None] < layers[None, None, :, None]
    return torch.where(earlier, scores, 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# What a model's weights say over all layers: the biases that it adds up, the names of its heads.
# ----------------------------------------------------------------------------------------------------------------------


class Labels(list[str]):
    """A list of names; calling it gives itself. HookedTransformer has a method, TransformerLens 3 a property."""

    def __call__(self) -> Labels:
        return self


def accumulated_bias(
    model: StudiedBridge, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> Float[Tensor, " d_model"]:
    """The sum of the output biases of all layers before one; see `TransformerBridge.accumulated_bias`.

    Args:
        model: the bridge.
        layer, mlp_input, include_mlp_biases: as there.

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
    """The names of all heads; see `TransformerBridge.all_head_labels`.

    Args:
        model: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.svd import head_labels
        >>> head_labels(TransformerBridge.boot_embedded())[3:6]
        ['L0H3', 'L1H0', 'L1H1']
    """
    names, hooks = {"blocks": "", "encoder": "E", "decoder": "D"}, model.hook_dict
    layers = {
        f"{letter}L{i}": hooks[name].point.axes
        for stack, letter in names.items()
        for i in range(len(hooks))
        if (name := f"{stack}.{i}.attn.hook_z") in hooks
    }
    return Labels(f"{layer}H{head}" for layer, axes in layers.items() for head in range(heads_shown(model.cfg, axes)))
