"""In which order rows are read: pieces of shards at random, and rows at random within what memory holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.harvest.errors import HarvestError

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Share:
    """Whose part of the rows is read, of equal parts.

    Attributes:
        rank, ranks: which process of how many.
        worker, workers: which of its loading workers of how many.
    """

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        for what, part, of in (("rank", self.rank, self.ranks), ("worker", self.worker, self.workers)):
            if not 0 <= part < of:
                raise HarvestError(f"{what} is {part}; it must be from 0 to {of - 1}, for {of} of them")

    def of(self, pieces: Array) -> Array:
        """This part of the pieces: every one of them is in exactly one part.

        Args:
            pieces: ``[piece]``, in the order that all parts agree on.
        """
        return pieces[self.rank * self.workers + self.worker :: self.ranks * self.workers]


def piece_order(count: int, seed: int | None, epoch: int) -> Array:
    """``[piece]``: the order in which pieces are read; as they stand without a seed.

    Args:
        count: how many there are.
        seed: reproduces the order.
        epoch: another order for each.
    """
    if seed is None:
        return np.arange(count)
    return np.random.default_rng([seed, epoch]).permutation(count)


class ShufflePool:
    """Rows in memory, from which batches are drawn at random.

    Args:
        columns: type and shape of each column's rows.
        rows: how many it holds, at most.
        rng: draws.
    """

    def __init__(self, columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]], rows: int, rng: Any) -> None:
        self.arrays = {name: np.empty((rows, *shape), kind) for name, (kind, shape) in columns.items()}
        self.room, self.held, self.rng = rows, 0, rng

    def put(self, piece: dict[str, Array]) -> None:
        """Takes rows in."""
        count = len(next(iter(piece.values())))
        for name, array in self.arrays.items():
            array[self.held : self.held + count] = piece[name]
        self.held += count

    def draw(self, size: int, last: bool) -> Iterator[dict[str, Array]]:
        """All rows in batches, at random; those that fill none stay, unless nothing comes after them.

        Args:
            size: rows in a batch.
            last: nothing comes after.
        """
        order = self.rng.permutation(self.held)
        whole = self.held if last else self.held // size * size
        for start in range(0, whole, size):
            chosen = order[start : start + size]
            yield {name: take(array, chosen) for name, array in self.arrays.items()}
        rest = np.sort(order[whole:])
        for array in self.arrays.values():
            array[: len(rest)] = array[rest]
        self.held = len(rest)


def take(array: Array, rows: Array) -> Array:
    """Some rows of an array, copied.

    Args:
        array: ``[row, ...]``.
        rows: ``[taken]``.
    """
    return np.take(array, rows, axis=0)
