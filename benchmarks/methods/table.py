"""The rows of docs/methods.md: what is compared with what, and the largest difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor

#: Ours, and what it is compared with.
Pair = tuple[Tensor, Tensor]
BY_HAND = "formula, by hand in float64"
#: Code that is an installed package, whose version the table names.
PACKAGES = (
    "auto-circuit",
    "gim-explain",
    "lxt",
    "pyvene",
    "sae-lens",
    "scikit-learn",
    "tuned-lens",
)


@dataclass(frozen=True)
class Method:
    """A method with a paper, and its comparison.

    Args:
        name: the method.
        page: its page, relative to docs/.
        paper: authors and year.
        link: the paper's address.
        code: the code that it is compared with: one of `PACKAGES`, or a text.
        model: the model or models.
        compare: returns pairs of our numbers and theirs.
    """

    name: str
    page: str
    paper: str
    link: str
    code: str
    model: str
    compare: Callable[[], Sequence[Pair]]

    @property
    def other_code(self) -> str:
        """The code that it is compared with, and its version."""
        return f"{self.code} {version(self.code)}" if self.code in PACKAGES else self.code

    def difference(self) -> float:
        """Return the largest difference, relative to the largest number on the other side."""
        return max(relative(*pair) for pair in self.compare())


METHODS: list[Method] = []


def method(
    name: str, page: str, paper: str, link: str, code: str = BY_HAND, model: str = "shipped"
) -> Callable[[Callable[[], Sequence[Pair]]], Callable[[], Sequence[Pair]]]:
    """Return a decorator that declares a function of pairs as a row."""

    def declare(compare: Callable[[], Sequence[Pair]]) -> Callable[[], Sequence[Pair]]:
        METHODS.append(Method(name, page, paper, link, code, model, compare))
        return compare

    return declare


def relative(ours: Tensor, right: Tensor) -> float:
    """Return ``max |ours - right| / max |right|``; NaN must be in the same places.

    Raises:
        ValueError: the shapes differ, NaN is in other places, or there is nothing to compare with.
    """
    ours, right = ours.detach().double(), right.detach().double()
    if ours.shape != right.shape or not torch.equal(ours.isnan(), right.isnan()):
        raise ValueError(
            f"ours is {list(ours.shape)}, the other {list(right.shape)}, or NaN differs"
        )
    ours, right = ours.nan_to_num(), right.nan_to_num()
    largest = float(right.abs().max())
    if largest == 0:
        raise ValueError("all numbers are zero: nothing is compared")
    return float((ours - right).abs().max()) / largest


def numbers(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Return numbers in float64."""
    return torch.tensor(values, dtype=torch.float64)
