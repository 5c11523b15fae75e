"""Fold the values' biases into the attention's output bias."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from weight_processing.matrices import check_tensor


def fold_value_biases(
    b_V: Float[Tensor, "kv_heads d_head"], W_O: Float[Tensor, "n_heads d_head d_model"]
) -> Float[Tensor, " d_model"]:
    """What is to be added to ``b_O`` when ``b_V`` becomes zero.

    A head's value is ``pattern @ (v + b_V) == pattern @ v + b_V`` since each row of the pattern sums to one; through
    ``W_O`` that bias is the same vector at every position, ``sum over heads of b_V[head] @ W_O[head]``. With grouped
    values, a bias counts once for each query head of its group.

    It does not hold where rows of the pattern do not sum to one (attention sinks), or where something stands between
    ``z`` and ``W_O`` (a gate, a norm).

    Args:
        b_V: one bias for each head, or for each group of them; `n_heads` is a multiple of their number.
        W_O: the output projection.

    Example:
        >>> import torch
        >>> from weight_processing import fold_value_biases
        >>> fold_value_biases(torch.tensor([[2.0]]), torch.tensor([[[1.0, 3.0]], [[10.0, 30.0]]]))
        tensor([22., 66.])
    """
    check_tensor("b_V", b_V, 2)
    check_tensor("W_O", W_O, 3)
    heads, d_head = b_V.shape
    if not heads or W_O.shape[0] % heads or W_O.shape[1] != d_head:
        raise ValueError(f"b_V has shape {[heads, d_head]} and W_O {list(W_O.shape)}: they are not of the same heads")
    each = b_V.repeat_interleave(W_O.shape[0] // b_V.shape[0], dim=0)
    return torch.einsum("hd,hdm->m", each, W_O)
