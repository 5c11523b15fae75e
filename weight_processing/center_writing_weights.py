"""Take out the mean of what is written to the residual stream."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weight_processing.matrices import check_tensor


def center_writing_weights(W: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
    """A matrix or bias that writes to the residual stream, with each row's mean taken out.

    Whatever is written has then a mean of zero over ``d_model``. ``layer_norm(x) == layer_norm(x - x.mean())``: a layer
    norm, which subtracts the mean, does not see the difference.

    It does not hold where anything reads the stream without subtracting its mean: an RMS norm, or no norm at all.

    Args:
        W: ``W_E``, ``W_pos``, ``W_O``, ``b_O``, ``W_out`` or ``b_out``.

    Example:
        >>> import torch
        >>> from weight_processing import center_writing_weights
        >>> center_writing_weights(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[-1.,  0.,  1.]])
    """
    check_tensor("W", W)
    return W - W.mean(-1, keepdim=True)
