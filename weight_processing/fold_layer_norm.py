"""Fold a norm's weight and bias into a matrix that reads it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weight_processing.matrices import check_tensor


def fold_layer_norm(
    W: Float[Tensor, "*heads d_model out"],
    w: Float[Tensor, " d_model"] | None,
    b: Float[Tensor, " d_model"] | None = None,
    center: bool = True,
) -> tuple[Float[Tensor, "*heads d_model out"], Float[Tensor, "*heads out"] | None]:
    """The matrix that makes of the bare normalised value what `W` makes of the norm's output.

    With ``n`` the normalised value, ``(n * w + b) @ W == n @ (w[:, None] * W) + b @ W``. The bare value of a layer norm
    sums to zero over ``d_model``, so that a constant in each column of the matrix is never seen: it is taken out, and
    each column sums to zero.

    It does not hold if anything between the norm and the matrix is not linear, or reads the norm's output besides this
    matrix and is left as it is; and for an RMS norm, whose value does not sum to zero, nothing may be taken out.

    Args:
        W: a matrix that reads the norm (``W_Q``, ``W_in``, ``W_U``, ...).
        w: the factor that the norm multiplies with (for Gemma, 1 + its stored weight); None: it has none.
        b: the norm's bias; None: it has none.
        center: the norm subtracts the mean (a layer norm).

    Returns:
        The new matrix, and what is to be added to the bias behind it (None where the norm has no bias). The norm is
        then to have a weight of ones and a bias of zeros.

    Example:
        >>> import torch
        >>> from weight_processing import fold_layer_norm
        >>> n, w, b, W = torch.tensor([1.0, 0.0, -1.0]), torch.rand(3), torch.rand(3), torch.rand(3, 2)
        >>> folded, bias = fold_layer_norm(W, w, b)
        >>> torch.allclose(n @ folded + bias, (n * w + b) @ W, atol=1e-6)
        True
    """
    check_tensor("W", W)
    if W.ndim < 2:
        raise ValueError(f"W has shape {list(W.shape)}; it must be a matrix, [*heads, d_model, out]")
    for name, value in (("w", w), ("b", b)):
        if value is not None:
            check_tensor(name, value, 1)
            if len(value) != W.shape[-2]:
                raise ValueError(f"{name} has shape {list(value.shape)} and W {list(W.shape)}: d_model is not the same")
    bias = None if b is None else b @ W
    folded = W.clone() if w is None else W * w.unsqueeze(-1)
    if center:
        folded -= folded.mean(-2, keepdim=True)
    return folded, bias
