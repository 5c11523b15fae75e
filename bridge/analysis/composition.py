"""How much one head reads of what an earlier head writes, from the weights."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.hooks.arguments import check_choice, refuse_wrong_types
from bridge.weights.factored_matrix import FactoredMatrix, at_least_float32


class HasCircuits(Protocol):
    """What composition scores need of a bridge."""

    @property
    def OV(self) -> FactoredMatrix:
        """Each head's ``W_V @ W_O``, ``[n_layers, n_heads, d_model, d_model]``."""
        ...

    @property
    def QK(self) -> FactoredMatrix:
        """Each head's ``W_Q @ W_K.T``, ``[n_layers, n_heads, d_model, d_model]``."""
        ...


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
        >>> from bridge.analysis.composition import composition_scores
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


def all_scores(model: HasCircuits, mode: str) -> Float[Tensor, "n_layers n_heads n_layers n_heads"]:
    """The composition scores of all pairs of heads; see `TransformerBridge.all_composition_scores`.

    Args:
        model: the bridge.
        mode: ``Q``, ``K`` or ``V``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.composition import all_scores
        >>> all_scores(TransformerBridge.boot_embedded(), "K").shape
        torch.Size([4, 4, 4, 4])
    """
    check_choice("mode", mode, ("Q", "K", "V"))
    left = model.OV
    right = left if mode == "V" else model.QK if mode == "Q" else model.QK.T
    scores = composition_scores(left, right)
    layers = torch.arange(len(scores), device=scores.device)
    earlier = layers[:, None, None, None] < layers[None, None, :, None]
    return torch.where(earlier, scores, 0.0)
