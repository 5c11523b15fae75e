"""What is done to weights so that the model stays the same: norms folded, writers centred, factors of heads chosen."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Choose other factors of the products that an attention head is made of.
# ----------------------------------------------------------------------------------------------------------------------


Matrix = Float[Tensor, "n_heads d_model d_head"]
Bias = Float[Tensor, "n_heads d_head"]


def _svd_of_product(
    A: Float[Tensor, "n_heads a d_head"], B: Float[Tensor, "n_heads b d_head"]
) -> tuple[Float[Tensor, "n_heads a d_head"], Float[Tensor, "n_heads d_head"], Float[Tensor, "n_heads b d_head"]]:
    """``U, S, V`` with ``A @ B.mT == U @ diag(S) @ V.mT``, without ever making the large product."""
    (q_a, r_a), (q_b, r_b) = torch.linalg.qr(A), torch.linalg.qr(B)
    u, s, vh = torch.linalg.svd(r_a @ r_b.mT, full_matrices=False)
    return q_a @ u, s, q_b @ vh.mT


def refactor_query_key(W_Q: Matrix, b_Q: Bias, W_K: Matrix, b_K: Bias) -> tuple[Matrix, Bias, Matrix, Bias]:
    """Queries and keys with orthogonal columns, the n-th of both having the same norm.

    Scores are ``(x @ W_Q + b_Q) . (y @ W_K + b_K)``. With the biases as one more row of the matrices, that is
    ``[x 1] @ W_Q @ W_K.T @ [y 1].T``: only the product counts, and ``W_Q = U sqrt(S)``, ``W_K = V sqrt(S)`` from its
    singular value decomposition make the same one.

    It does not hold where anything is done to queries or keys before they meet (rotary embeddings, norms), or where
    several query heads share a key head. ``d_head`` may be at most ``d_model``.

    Args:
        W_Q, b_Q, W_K, b_K: one layer's weights.

    Returns:
        The new four. Columns are defined up to a sign, the same for both matrices.

    Example:
        >>> import torch
        >>> from weight_processing import refactor_query_key
        >>> W_Q, b_Q, W_K, b_K = torch.rand(2, 6, 3), torch.rand(2, 3), torch.rand(2, 6, 3), torch.rand(2, 3)
        >>> new = refactor_query_key(W_Q, b_Q, W_K, b_K)
        >>> torch.allclose(new[0] @ new[2].mT, W_Q @ W_K.mT, atol=1e-5)
        True
    """
    with_bias = (torch.cat([W, b.unsqueeze(1)], dim=1) for W, b in ((W_Q, b_Q), (W_K, b_K)))
    u, s, v = _svd_of_product(*with_bias)
    root = s.sqrt().unsqueeze(1)
    query, key = u * root, v * root
    return query[:, :-1], query[:, -1], key[:, :-1], key[:, -1]


def refactor_value_output(
    W_V: Matrix, W_O: Float[Tensor, "n_heads d_head d_model"]
) -> tuple[Matrix, Float[Tensor, "n_heads d_head d_model"]]:
    """Values and output with orthogonal columns and rows, those of ``W_O`` of norm one.

    A head writes ``pattern @ x @ W_V @ W_O``: only the product counts, and ``W_V = U S``, ``W_O = V.T`` from its
    singular value decomposition make the same one. A head's ``z`` then has the same norm as its result.

    It does not hold where several query heads share a value head, where something stands between ``z`` and ``W_O``, or
    with value biases: fold those first.

    Args:
        W_V, W_O: one layer's weights.

    Example:
        >>> import torch
        >>> from weight_processing import refactor_value_output
        >>> W_V, W_O = torch.rand(2, 6, 3), torch.rand(2, 3, 6)
        >>> V, O = refactor_value_output(W_V, W_O)
        >>> torch.allclose(V @ O, W_V @ W_O, atol=1e-5), torch.allclose(O @ O.mT, torch.eye(3), atol=1e-5)
        (True, True)
    """
    u, s, v = _svd_of_product(W_V, W_O.mT)
    return u * s.unsqueeze(1), v.mT


# ----------------------------------------------------------------------------------------------------------------------
# Refusing what is no matrix or bias, by name.
# ----------------------------------------------------------------------------------------------------------------------


def check_tensor(name: str, value: object, *axes: int) -> None:
    """Refuses what is no tensor of floating-point numbers with as many axes.

    Args:
        name: of the argument.
        value: it.
        axes: how many axes it may have; none: any.

    Raises:
        TypeError: it is no such tensor.
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
    if axes and value.ndim not in axes:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {' or '.join(map(str, axes))} axes")
    if not value.ndim:
        raise ValueError(f"{name} is a single number; it must be a matrix or a bias")


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


# ----------------------------------------------------------------------------------------------------------------------
# Fold the values' biases into the attention's output bias.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Take out the mean of what is written to the residual stream.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Take out what the unembedding adds to all logits alike.
# ----------------------------------------------------------------------------------------------------------------------


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
