"""Means, norms and covariances, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bridge.harvest.errors import HarvestError


@dataclass(frozen=True)
class Statistics:
    """What is known of one column, in float64.

    Attributes:
        rows: how many there are.
        mean: ``[...]``, of each number of a row.
        variance: ``[...]``, likewise, divided by ``rows``.
        norm: the mean of the rows' Euclidean lengths.
        covariance: ``[d, d]`` of the flattened rows, divided by ``rows``; None where it was not asked for.
    """

    rows: int
    mean: Float[Tensor, "*shape"]
    variance: Float[Tensor, "*shape"]
    norm: float
    covariance: Float[Tensor, "d d"] | None


def statistics_of(pieces: Iterable[np.ndarray[Any, np.dtype[Any]]], name: str, covariance: bool) -> Statistics:
    """The statistics of rows that come a piece at a time.

    Pieces are merged as Chan, Golub and LeVeque (1983) merge them, which loses no digits when the mean is far from 0.

    Args:
        pieces: ``[row, ...]`` each.
        name: the column, for the error.
        covariance: of all pairs of numbers, too.

    Raises:
        HarvestError: the column holds something else than finite floating-point numbers, or no rows.
    """
    rows, norms = 0, 0.0
    mean = spread = None
    shape: tuple[int, ...] = ()
    for piece in pieces:
        if not np.issubdtype(piece.dtype, np.floating):
            raise HarvestError(f"{name} holds {piece.dtype}, and statistics are of floating-point numbers")
        shape = piece.shape[1:]
        x = torch.from_numpy(np.array(piece, np.float64).reshape(len(piece), -1))
        if not bool(x.isfinite().all()):
            raise HarvestError(f"{name} holds infinite values (masked scores, say), which have no mean")
        own = x.mean(0)
        centred = x - own
        own_spread = centred.T @ centred if covariance else centred.square().sum(0)
        norms += float(x.norm(dim=1).sum())
        if mean is None or spread is None:
            mean, spread = own, own_spread
        else:
            apart = own - mean
            weight = rows * len(x) / (rows + len(x))
            spread += own_spread + weight * (torch.outer(apart, apart) if covariance else apart.square())
            mean = mean + apart * (len(x) / (rows + len(x)))
        rows += len(x)
    if mean is None or spread is None:
        raise HarvestError(f"{name} has no rows")
    whole = spread / rows
    variance = (whole.diagonal() if covariance else whole).reshape(shape)
    return Statistics(rows, mean.reshape(shape), variance, norms / rows, whole if covariance else None)
