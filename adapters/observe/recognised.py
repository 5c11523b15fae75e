"""Which norm a module computes, found by trying: never by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class RecognisedNorm:
    """``(x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias``, the mean only if it is centred.

    Attributes:
        centered: the mean is subtracted.
        offset: what is added to the weight: 0 or 1.
        eps: as found from the smallest input, to about one in a thousand where the input was small enough; where it
            had no effect, None.
    """

    centered: bool
    offset: float
    eps: float | None

    @property
    def computes(self) -> Literal["layer", "rms"]:
        """What it is."""
        return "layer" if self.centered else "rms"


def recognise_norm(
    x: Float[Tensor, "*batch width"],
    y: Float[Tensor, "*batch width"],
    weight: Float[Tensor, " width"] | None = None,
    bias: Float[Tensor, " width"] | None = None,
    *,
    tolerance: float = 2e-5,
) -> RecognisedNorm | None:
    """Which norm makes `y` of `x`, None where none does.

    Args:
        x, y: what entered it and what left it. Rows of different sizes, some with a mean square near epsilon, tell
            more: see `probe`.
        weight, bias: its parameters.
        tolerance: what values may differ by, relative to the largest of their row.
    """
    if not x.numel():  # an expert that no token was sent to
        return None
    x, y = x.detach().double().flatten(0, -2), y.detach().double().flatten(0, -2)
    shift = 0 if bias is None else bias.detach().double()
    for centered in (False, True):
        for offset in (0.0, 1.0) if weight is not None else (0.0,):
            factor = 1.0 if weight is None else weight.detach().double() + offset
            around = x - x.mean(-1, keepdim=True) if centered else x
            found = _explains(around, y, factor, shift, tolerance)
            if found is not None:
                return RecognisedNorm(centered, offset, found if found >= 0 else None)
    return None


def _explains(x: Tensor, y: Tensor, factor: Tensor | float, shift: Tensor | float, tolerance: float) -> float | None:
    """Epsilon, where ``y = x / sqrt(mean(x^2) + eps) * factor + shift`` in every row; -1 where it had no effect."""
    shaped = x * factor
    r = ((y - shift) * shaped).sum(-1) / shaped.pow(2).sum(-1)
    if not bool((r > 0).all()):
        return None
    square = x.pow(2).mean(-1)
    smallest = square.argmin()
    eps = float(r[smallest] ** -2 - square[smallest])
    visible = eps > 50 * tolerance * float(square[smallest])
    if not visible and abs(eps) > 4 * tolerance * float(square[smallest]):
        return None
    expected = shaped * (square + (eps if visible else 0.0)).rsqrt()[:, None] + shift
    bound = tolerance * y.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (eps if visible else -1.0) if bool(((expected - y).abs() <= 4 * bound).all()) else None


def probe(
    width: int, like: Tensor, *, sizes: tuple[float, ...] = (3e-4, 3e-3, 3e-2, 1.0)
) -> Float[Tensor, "size width"]:
    """Rows of different sizes, around a mean that is not zero: what tells norms and their epsilons apart.

    Args:
        width: of a row.
        like: a tensor of the type and on the device that they are to have.
        sizes: of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(sizes), width, generator=generator, dtype=torch.float64) + 0.5
    return (rows * torch.tensor(sizes, dtype=torch.float64)[:, None]).to(like)


def recognise_module(
    module: nn.Module,
    width: int,
    like: Tensor,
    *,
    weight: Float[Tensor, " width"] | None = None,
    bias: Float[Tensor, " width"] | None = None,
    tolerance: float = 2e-5,
) -> RecognisedNorm | None:
    """Which norm a module computes, from its own forward on rows that tell them apart; None where it is none.

    A weight of ones, or of zeros, is no obstacle: it is where weight and ``1 + weight`` differ most.

    Args:
        module: it is called through `forward`: no hook sees it.
        width: of what it norms.
        like: a tensor as it is given in a run: of that type, and with as many axes.
        weight, bias, tolerance: as for `recognise_norm`.
    """
    x = probe(width, like)
    x = x.reshape(*(1 for _ in range(like.ndim - 2)), *x.shape)
    with torch.no_grad():
        y = module.forward(x)
    if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
        return None
    return recognise_norm(x, y, weight, bias, tolerance=tolerance)
