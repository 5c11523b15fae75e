"""Exact transforms of single weights: folding norms and biases, centering, and refactoring
heads.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

#: One layer's projection to its heads, and the projection's bias.
Matrix = Float[Tensor, "n_heads d_model d_head"]
Bias = Float[Tensor, "n_heads d_head"]
#: One layer's output projection.
OutputMatrix = Float[Tensor, "n_heads d_head d_model"]
#: A matrix that reads a norm.
ReadingMatrix = Float[Tensor, "*heads d_model out"]
#: A norm's weight, or a bias that is added to the residual stream.
StreamVector = Float[Tensor, " d_model"]
#: A matrix or bias that writes to the residual stream.
WritingMatrix = Float[Tensor, "*rows d_model"]
#: The unembedding or its bias.
Unembedding = Float[Tensor, "*rows d_vocab_out"]

# --------------------------------------------------------------------------------------------------
# Refactor the matrix products of an attention head.
# --------------------------------------------------------------------------------------------------


def _svd_of_product(A: Matrix, B: Matrix) -> tuple[Matrix, Bias, Matrix]:
    """Return ``U, S, V`` with ``A @ B.mT == U @ diag(S) @ V.mT``, without computing the large
    product.
    """
    q_a, r_a = torch.linalg.qr(A)
    q_b, r_b = torch.linalg.qr(B)
    small = r_a @ r_b.mT
    u, s, vh = torch.linalg.svd(small, full_matrices=False)
    return q_a @ u, s, q_b @ vh.mT


def refactor_query_key(
    W_Q: Matrix, b_Q: Bias, W_K: Matrix, b_K: Bias
) -> tuple[Matrix, Bias, Matrix, Bias]:
    """Refactor queries and keys to orthogonal columns, so that the n-th columns of both have the
    same norm.

    Scores are ``(x @ W_Q + b_Q) . (y @ W_K + b_K)``. With the biases as an additional row of the
    matrices, they are ``[x 1] @ W_Q @ W_K.T @ [y 1].T``: only the product matters. ``W_Q = U
    sqrt(S)`` and ``W_K = V sqrt(S)`` from its singular value decomposition give the same product.

    This changes the model if anything is applied to queries or keys before their product (rotary
    embeddings, norms), or if several query heads share a key head. ``d_head`` may be at most
    ``d_model``.

    Args:
        W_Q, b_Q, W_K, b_K: one layer's weights.

    Returns:
        The four new weights. Columns are unique up to a sign, the same for both matrices.

    Example:
        >>> import torch
        >>> from weight_processing import refactor_query_key
        >>> W_Q, b_Q, W_K, b_K = (
        ...     torch.rand(2, 6, 3),
        ...     torch.rand(2, 3),
        ...     torch.rand(2, 6, 3),
        ...     torch.rand(2, 3),
        ... )
        >>> new = refactor_query_key(W_Q, b_Q, W_K, b_K)
        >>> torch.allclose(new[0] @ new[2].mT, W_Q @ W_K.mT, atol=1e-5)
        True
    """
    query_and_bias = torch.cat([W_Q, b_Q.unsqueeze(1)], dim=1)
    key_and_bias = torch.cat([W_K, b_K.unsqueeze(1)], dim=1)
    u, s, v = _svd_of_product(query_and_bias, key_and_bias)
    root = s.sqrt().unsqueeze(1)
    query = u * root
    key = v * root
    W_Q, b_Q = query[:, :-1], query[:, -1]
    W_K, b_K = key[:, :-1], key[:, -1]
    return W_Q, b_Q, W_K, b_K


def refactor_value_output(W_V: Matrix, W_O: OutputMatrix) -> tuple[Matrix, OutputMatrix]:
    """Refactor values and output to orthogonal columns and rows; the rows of ``W_O`` get norm one.

    A head writes ``pattern @ x @ W_V @ W_O``: only the product matters. ``W_V = U S`` and ``W_O =
    V.T`` from its singular value decomposition give the same product. A head's ``z`` then has the
    same norm as its result.

    This changes the model if several query heads share a value head, if anything is applied between
    ``z`` and ``W_O``, or with value biases: fold those first.

    Args:
        W_V, W_O: one layer's weights.

    Example:
        >>> import torch
        >>> from weight_processing import refactor_value_output
        >>> W_V, W_O = torch.rand(2, 6, 3), torch.rand(2, 3, 6)
        >>> V, O = refactor_value_output(W_V, W_O)
        >>> (
        ...     torch.allclose(V @ O, W_V @ W_O, atol=1e-5),
        ...     torch.allclose(O @ O.mT, torch.eye(3), atol=1e-5),
        ... )
        (True, True)
    """
    u, s, v = _svd_of_product(W_V, W_O.mT)
    return u * s.unsqueeze(1), v.mT


# --------------------------------------------------------------------------------------------------
# Input validation: tensors of the right dtype and number of axes.
# --------------------------------------------------------------------------------------------------


def check_tensor(name: str, value: object, axes: int | None = None) -> None:
    """Check that a value is a floating-point tensor with the right number of axes.

    Args:
        name: the name of the argument.
        value: the value.
        axes: the number of axes; None: any but zero.

    Raises:
        TypeError: it is not a floating-point tensor.
        ValueError: it has another number of axes.

    Example:
        >>> import torch
        >>> from weight_processing.transforms import check_tensor
        >>> check_tensor("W_O", torch.zeros(2, 3), 3)
        Traceback (most recent call last):
        ValueError: W_O has shape [2, 3]; it must have 3 axes
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; it must be a tensor")
    if not value.is_floating_point():
        raise TypeError(f"{name} is of {value.dtype}; it must be of floating-point numbers")
    if axes is not None and value.ndim != axes:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {axes} axes")
    if not value.ndim:
        raise ValueError(f"{name} is a single number; it must be a matrix or a bias")


def fold_layer_norm(
    W: ReadingMatrix,
    w: StreamVector | None,
    b: StreamVector | None = None,
    center: bool = True,
) -> tuple[ReadingMatrix, Float[Tensor, "*heads out"] | None]:
    """Fold a norm's weight and bias into a matrix that reads it.

    With ``n`` the normalised value, ``(n * w + b) @ W == n @ (w[:, None] * W) + b @ W``. A layer
    norm's normalised value sums to zero over ``d_model``, so a constant in each column of the
    matrix has no effect: it is subtracted, and each column sums to zero.

    This changes the model if anything nonlinear lies between the norm and the matrix, or if another
    reader of the norm's output is not folded. Do not center for an RMS norm, whose value does not
    sum to zero.

    Args:
        W: a matrix that reads the norm (``W_Q``, ``W_in``, ``W_U``, ...).
        w: the norm's factor (for Gemma, 1 + its stored weight); None: it has none.
        b: the norm's bias; None: it has none.
        center: whether the norm subtracts the mean (a layer norm).

    Returns:
        The new matrix, and the vector to add to the bias after it (None if the norm has no bias).
        Then set the norm's weight to ones and its bias to zeros.

    Example:
        >>> import torch
        >>> from weight_processing import fold_layer_norm
        >>> n, w, b, W = (
        ...     torch.tensor([1.0, 0.0, -1.0]),
        ...     torch.rand(3),
        ...     torch.rand(3),
        ...     torch.rand(3, 2),
        ... )
        >>> folded, bias = fold_layer_norm(W, w, b)
        >>> torch.allclose(n @ folded + bias, (n * w + b) @ W, atol=1e-6)
        True
    """
    check_tensor("W", W)
    if W.ndim < 2:
        raise ValueError(
            f"W has shape {list(W.shape)}; it must be a matrix, [*heads, d_model, out]"
        )
    for name, value in (("w", w), ("b", b)):
        if value is None:
            continue
        check_tensor(name, value, 1)
        if len(value) != W.shape[-2]:
            shapes = f"{name} has shape {list(value.shape)} and W {list(W.shape)}"
            raise ValueError(f"{shapes}: d_model is not the same")
    if w is None:
        folded = W.clone()
    else:
        folded = W * w.unsqueeze(-1)
    if center:
        folded -= folded.mean(-2, keepdim=True)
    if b is None:
        return folded, None
    return folded, b @ W


# --------------------------------------------------------------------------------------------------
# Fold the value biases into the attention's output bias.
# --------------------------------------------------------------------------------------------------


def fold_value_biases(b_V: Float[Tensor, "kv_heads d_head"], W_O: OutputMatrix) -> StreamVector:
    """Return the vector to add to ``b_O`` when ``b_V`` is set to zero.

    A head's output is ``pattern @ (v + b_V) == pattern @ v + b_V``, because each row of the pattern
    sums to one. Through ``W_O`` that bias is the same vector at every position, ``sum over heads of
    b_V[head] @ W_O[head]``. With grouped values, a bias counts once for each query head of its
    group.

    This changes the model if rows of the pattern do not sum to one (attention sinks), or if
    anything is applied between ``z`` and ``W_O`` (a gate, a norm).

    Args:
        b_V: one bias for each head, or for each group of heads; `n_heads` is a multiple of their
            number.
        W_O: the output projection.

    Example:
        >>> import torch
        >>> from weight_processing import fold_value_biases
        >>> fold_value_biases(torch.tensor([[2.0]]), torch.tensor([[[1.0, 3.0]], [[10.0, 30.0]]]))
        tensor([22., 66.])
    """
    check_tensor("b_V", b_V, 2)
    check_tensor("W_O", W_O, 3)
    kv_heads, d_head = b_V.shape
    n_heads = len(W_O)
    if not kv_heads or n_heads % kv_heads or W_O.shape[1] != d_head:
        raise ValueError(
            f"b_V has shape {[kv_heads, d_head]} and W_O {list(W_O.shape)}: they are not of the"
            " same heads"
        )
    bias_of_heads = b_V.repeat_interleave(n_heads // kv_heads, dim=0)
    return torch.einsum("hd,hdm->m", bias_of_heads, W_O)


# --------------------------------------------------------------------------------------------------
# Subtract the mean of the outputs to the residual stream.
# --------------------------------------------------------------------------------------------------


def center_writing_weights(W: WritingMatrix) -> WritingMatrix:
    """Subtract each row's mean from a matrix or bias that writes to the residual stream.

    Its output then has a mean of zero over ``d_model``. ``layer_norm(x) == layer_norm(x -
    x.mean())``: a layer norm, which subtracts the mean, returns the same result.

    This changes the model if anything reads the stream without subtracting its mean: an RMS norm,
    or no norm at all.

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


# --------------------------------------------------------------------------------------------------
# Subtract the unembedding's constant contribution to all logits.
# --------------------------------------------------------------------------------------------------


def center_unembed(W_U: Unembedding, mean: Float[Tensor, "*rows 1"] | None = None) -> Unembedding:
    """Subtract the mean over the vocabulary from the unembedding, or from its bias.

    At each position all logits change by the same amount, and ``log_softmax(x) == log_softmax(x -
    x.mean())``: log probabilities and losses stay the same, and the logits have a mean of zero.

    This changes the model if anything nonlinear lies between the unembedding and the softmax: a
    soft cap.

    Args:
        W_U: ``W_U``, ``[d_model, d_vocab_out]``, or ``b_U``, ``[d_vocab_out]``; or some of its
            columns, with the mean.
        mean: the mean over the whole vocabulary; None: the mean of the given columns.

    Example:
        >>> import torch
        >>> from weight_processing import center_unembed
        >>> center_unembed(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[-2., -1.,  3.]])
    """
    check_tensor("W_U", W_U)
    if mean is None:
        return W_U - W_U.mean(-1, keepdim=True)
    check_tensor("mean", mean)
    return W_U - mean
