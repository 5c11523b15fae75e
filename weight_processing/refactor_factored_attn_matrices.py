"""Choose other factors of the products that an attention head is made of."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

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
