"""Which tokens an expert's rows are, and what the results of experts are multiplied with in the sum of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.observe.tolerance import agree

#: A row counts as a token's where no number differs by more than rounding, relative to the largest.
_SAME_ROW = 1e-6


def results_by_token(
    tokens: Float[Tensor, "token d_model"], experts: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> tuple[Float[Tensor, "token expert d_model"], Bool[Tensor, "token expert"]]:
    """What each expert made of each token, zero of those that it was not given; and whether it was given it.

    Args:
        tokens: what the mixture is given.
        experts: for each expert the rows that it was given, and what it made of them, ``[row, d_model]``.
    """
    results = tokens.new_zeros(len(tokens), len(experts), tokens.shape[-1])
    sent = torch.zeros(results.shape[:2], dtype=torch.bool, device=results.device)
    close = _SAME_ROW * float(tokens.abs().max())
    for e, calls in enumerate(experts):
        for rows, made in calls:
            token, row = ((tokens[:, None] - rows.to(tokens)).abs().amax(-1) <= close).nonzero(as_tuple=True)
            results[token, e], sent[token, e] = made.to(tokens)[row], True
    return results, sent


def weights_in_sum(
    total: Float[Tensor, "token d_model"],
    results: Float[Tensor, "token expert d_model"],
    others: Sequence[Float[Tensor, "token d_model"]],
    like: Tensor,
) -> Float[Tensor, "token term"] | None:
    """What results, and others, are multiplied with to make a sum, token by token; None where they do not make it.

    Args:
        total: the sum.
        results: of experts, zero where they were not given the token: they have no weight there.
        others: that all tokens have.
        like: a tensor of the type that the sum was computed in.
    """
    columns = torch.cat([results, *(x[:, None] for x in others)], 1).transpose(1, 2)
    solution = torch.linalg.lstsq(columns.cpu(), total.cpu().unsqueeze(-1), driver="gelsd").solution.to(columns)
    if not agree((columns @ solution)[..., 0], total, like):
        return None
    return solution[..., 0]
