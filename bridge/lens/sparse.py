"""Sparse sums of dictionary vectors: which of them make up a vector, and how many."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

#: Numbers below this share of the vector count as zero, in float64.
_TOLERANCE = math.sqrt(torch.finfo(torch.float64).eps)
#: A vector whose cosine with the rest is below this explains none of it, in float32.
_SMALLEST_COSINE = math.sqrt(torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class SparseDecomposition:
    """A vector as a sum of a few tokens' vectors with non-negative coefficients, and a rest.

    Attributes:
        tokens: the selected tokens, in the order of selection.
        coefficients: the tokens' coefficients; 0 for a token that later ones replaced.
        reconstruction: the sum of coefficients times vectors.
        component: the projection on the span of all selected tokens' vectors.
        rest: the vector without that component.
    """

    tokens: Int[Tensor, " token"]
    coefficients: Float[Tensor, " token"]
    reconstruction: Float[Tensor, " d_model"]
    component: Float[Tensor, " d_model"]
    rest: Float[Tensor, " d_model"]


@dataclass(frozen=True)
class Occupancy:
    """The share of a vector that each token of a greedy selection explains, and the same for random
    directions.

    Attributes:
        captured: the share of the squared norm that each further token explains.
        control: the same for random directions, averaged.
        tokens: the selected tokens.
    """

    captured: Float[Tensor, " most"]
    control: Float[Tensor, " most"]
    tokens: Int[Tensor, " most"]

    @property
    def count(self) -> int:
        """Return the number of tokens at which their cumulative share exceeds that of random
        directions most."""
        return int((self.captured - self.control).cumsum(-1).argmax()) + 1


@dataclass(frozen=True)
class Dictionary:
    """Vectors that are selected one by one to explain another vector.

    Args:
        atoms: the vectors.

    Raises:
        ValueError: a vector is zero or not finite.
    """

    atoms: Float[Tensor, "atom d_model"]

    def __post_init__(self) -> None:
        wrong = ~(self.norms.isfinite() & (self.norms > 0))
        if bool(wrong.any()):
            raise ValueError(f"{int(wrong.sum())} tokens have vectors of zeros, or not finite ones")

    @functools.cached_property
    def norms(self) -> Float[Tensor, " atom"]:
        """Return the vectors' lengths."""
        return self.atoms.norm(dim=1)

    def _best(self, rest: Tensor, selected: list[int]) -> tuple[int, float]:
        """Return the unselected atom with the largest cosine with a vector, and the vector's
        component along it."""
        along = (self.atoms @ rest) / self.norms
        along[selected] = -math.inf
        best = along.max(0)
        return int(best.indices), float(best.values)

    def _units(self, selected: list[int]) -> Tensor:
        """Return selected atoms as unit vectors on the CPU, in float64."""
        return (self.atoms[selected].double() / self.norms[selected, None]).cpu()

    def decompose(self, vector: Float[Tensor, " d_model"], k: int) -> SparseDecomposition:
        """Select at most `k` atoms, each time the one with the largest cosine with the rest, and
        fit non-negative coefficients of all selected ones.

        Args:
            vector: the vector.
            k: the maximum number of atoms.

        Example:
            >>> import torch
            >>> from bridge.lens.sparse import Dictionary
            >>> Dictionary(torch.eye(3)).decompose(torch.tensor([3.0, 1.0, 0.0]), 2).coefficients
            tensor([3., 1.])
        """
        target, selected = vector.cpu().double(), list[int]()
        coefficients, fitted = target.new_empty(0), torch.zeros_like(target)
        while len(selected) < k:
            atom, along = self._best((target - fitted).to(vector), selected)
            if along <= _SMALLEST_COSINE * float(target.norm()):
                break
            selected.append(atom)
            units = self._units(selected)
            coefficients = _non_negative_fit(units, target, nn.functional.pad(coefficients, (0, 1)))
            fitted = coefficients @ units
        component = _projected(target, self._units(selected))
        lengths = self.norms[selected].cpu()
        vectors = [x.to(vector) for x in (fitted, component, target - component)]
        return SparseDecomposition(
            torch.tensor(selected, dtype=torch.long), (coefficients / lengths).to(vector), *vectors
        )

    def captured(
        self, vector: Float[Tensor, " d_model"], most: int
    ) -> tuple[Float[Tensor, " most"], Int[Tensor, " most"]]:
        """Select atoms by the largest cosine with the part that earlier ones do not explain.

        Args:
            vector: the vector.
            most: the number of atoms to select.

        Returns:
            The share of the vector's squared norm that each further atom explains, and the atoms.

        Example:
            >>> import torch
            >>> from bridge.lens.sparse import Dictionary
            >>> Dictionary(torch.eye(2)).captured(torch.tensor([3.0, 4.0]), 2)
            (tensor([0.6400, 0.3600]), tensor([1, 0]))
        """
        target, selected, shares = vector.cpu().double(), list[int](), [0.0]
        component = torch.zeros_like(target)
        for _ in range(most):
            selected.append(self._best((target - component).to(vector), selected)[0])
            component = _projected(target, self._units(selected))
            shares.append(float((component @ component) / (target @ target)))
        return torch.tensor(shares).diff(), torch.tensor(selected)


def _projected(target: Tensor, units: Tensor) -> Tensor:
    """Return the projection of a vector on the span of others, which may be linearly dependent."""
    return target @ torch.linalg.pinv(units, rtol=_TOLERANCE) @ units


def _non_negative_fit(units: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
    """Return the non-negative coefficients of the least-squares fit (Lawson and Hanson 1974).

    Args:
        units: ``[atom, d_model]``, unit vectors in float64.
        target: ``[d_model]``.
        coefficients: the initial ones: zero for some vectors, and positive least-squares
            coefficients for the others.
    """
    threshold = _TOLERANCE * float(target.norm())
    free = coefficients > 0
    for _ in range(10 * len(units)):
        slopes = (units @ (target - coefficients @ units)).masked_fill(free, -math.inf)
        if float(slopes.max()) <= threshold:
            return coefficients
        free[slopes.argmax()] = True
        goal = _fit_of(units, target, free)
        while bool((falling := free & (goal <= threshold)).any()):
            # Move towards the goal until a coefficient reaches zero, and fix it there.
            steps = coefficients[falling] / (coefficients - goal)[falling].clamp_min(threshold)
            coefficients = coefficients.lerp(goal, float(steps.min().clamp(max=1)))
            free = free & (coefficients > threshold)
            goal = _fit_of(units, target, free)
        coefficients = goal
    raise ValueError("the fit did not converge: the selected tokens' vectors depend on each other")


def _fit_of(units: Tensor, target: Tensor, free: Tensor) -> Tensor:
    """Return the least-squares coefficients of the free vectors, and zero for the others."""
    goal = target.new_zeros(len(units))
    goal[free] = target @ torch.linalg.pinv(units[free], rtol=_TOLERANCE)
    return goal


def random_control(
    vectors: Sequence[Tensor], atoms: int, most: int, controls: int, seed: int
) -> Float[Tensor, "row most"]:
    """Return, for each vector, the mean of `Dictionary.captured` over random directions.

    They are drawn on the CPU, so that a seed gives the same ones on every device.

    Args:
        vectors, most: as for `Dictionary.captured`.
        atoms: the number of directions in each dictionary.
        controls: the number of dictionaries.
        seed: the seed.

    Example:
        >>> import torch
        >>> from bridge.lens.sparse import random_control
        >>> random_control([torch.ones(8)], 20, 3, 2, 0).shape
        torch.Size([1, 3])
    """
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    total = torch.zeros(len(vectors), most)
    for _ in range(controls):
        directions = torch.randn(atoms, len(vectors[0]), generator=drawn, device="cpu")
        dictionary = Dictionary(directions.to(vectors[0]))
        total += torch.stack([dictionary.captured(vector, most)[0] for vector in vectors])
    return total / controls
