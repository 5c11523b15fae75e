"""Take out what the unembedding adds to all logits alike."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weight_processing.matrices import check_tensor


def center_unembed(
    W_U: Float[Tensor, "*rows d_vocab_out"], mean: Float[Tensor, "*rows 1"] | None = None
) -> Float[Tensor, "*rows d_vocab_out"]:
    """The unembedding, or its bias, with the mean over the vocabulary taken out.

    At each position all logits change by the same amount, and ``log_softmax(x) == log_softmax(x - x.mean())``: log
    probabilities and losses stay, the logits themselves have a mean of zero.

    It does not hold where something that is not linear stands between the unembedding and the softmax: a soft cap.

    Args:
        W_U: ``W_U``, ``[d_model, d_vocab_out]``, or ``b_U``, ``[d_vocab_out]``; or some columns of it, with the mean.
        mean: the mean over the whole vocabulary; None: that of the columns that are given.

    Example:
        >>> import torch
        >>> from weight_processing import center_unembed
        >>> center_unembed(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[-2., -1.,  3.]])
    """
    check_tensor("W_U", W_U)
    if mean is not None:
        check_tensor("mean", mean)
    return W_U - (W_U.mean(-1, keepdim=True) if mean is None else mean)
