"""That annotations are checked at all: what checks them has to be seen to refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from bridge.run.run import check_counted
from tests.shapes import lazily_checked as check


class HasName(Protocol):
    name: str


@check
def summed(x: Float[Tensor, "batch d"], y: Float[Tensor, "batch d"]) -> Float[Tensor, " batch"]:
    return (x + y).sum(-1)


@check
def summed_wrongly(x: Float[Tensor, "batch d"]) -> Float[Tensor, " batch"]:
    return x.sum(0)


@check
def counted(*words: str, times: int = 1) -> int:
    return len(words) * times


@check
def counted_wrongly() -> int:
    return "two"  # type: ignore[return-value]


@check
def first_words(words: list[str]) -> Iterator[str]:
    yield words[0]


@check
def name_of(thing: HasName) -> str:
    return "any"


@check
@dataclass
class Sized:
    n: int
    table: Float[Tensor, "n n"]

    @check
    def same(self) -> Self:
        return self

    @property
    @check
    def half(self) -> int:
        return self.n / 2  # type: ignore[return-value]

    @classmethod
    @check
    def of(cls, n: int) -> Sized:
        return cls(n, torch.zeros(n, n))

    @staticmethod
    @check
    def twice(n: int) -> int:
        return 2 * n


def local(n: object, out: object, *more: object, **other: object) -> object:
    @check
    def inner(n: int, *more: str, table: Float[Tensor, "n n"], **other: int) -> int:
        return out  # type: ignore[return-value]

    return inner(n, *more, table=torch.zeros(2, 2), **other)


def test_what_fits_passes():
    x = torch.zeros(2, 3)
    assert summed(x, x).shape == (2,)
    assert counted("a", "b", times=2) == 4
    assert list(first_words(["a"])) == ["a"]
    assert name_of(3) == "any"  # a protocol is mypy's
    assert Sized.of(2).same().n == 2 and Sized.twice(2) == 4
    assert local(1, 2) == local(1, 2, "three", four=4) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: summed(torch.zeros(2, 3), torch.zeros(2, 4)),
        lambda: summed(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)),
        lambda: summed_wrongly(torch.zeros(2, 3)),
        lambda: counted("a", 1),
        lambda: counted("a", times="2"),
        lambda: counted_wrongly(),
        lambda: first_words("a"),
        lambda: Sized("2", torch.zeros(2, 2)),
        lambda: Sized(2, torch.zeros(2, 3)),
        lambda: Sized(1, torch.zeros(1, 1)).half,
        lambda: Sized.of("2"),
        lambda: Sized.twice("2"),
        lambda: local("1", 2),
        lambda: local(1, "2"),
        lambda: local(1, 2, "three", 4),
        lambda: local(1, 2, four="4"),
    ],
)
def test_what_does_not_fit_is_refused(wrong):
    with pytest.raises(TypeCheckError):
        wrong()


@pytest.mark.skipif(bool(os.environ.get("UNCHECKED")), reason="asked for without checks")
def test_our_packages_are_checked():
    with pytest.raises(TypeCheckError):
        check_counted(torch.zeros(1, 3))


@pytest.mark.unchecked
def test_a_test_may_do_without():
    assert counted_wrongly() == "two"
    assert local(1, "2") == "2"
