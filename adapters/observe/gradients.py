"""Find the columns of a projection's output that reach a head's scores and its `z`, by gradient.

Each batch row is used for another head, so that one backward pass covers as many heads as there are
rows. All functions take tensors of one run with their graph, and do not depend on a model family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.observe.observe import NotFound, one_line

#: Mask of a tensor's columns that reach each head. None: no column reaches any head.
Reached = Bool[Tensor, "head column"] | None


class _Reaches(NamedTuple):
    """The columns of each examined tensor that reach the scores, from the query's position and from
    the keys' positions.
    """

    from_query: list[Reached]
    from_keys: list[Reached]


def by_position(x: Tensor, batch: int, pos: int) -> Float[Tensor, "batch pos column"] | None:
    """Return a tensor as a row of columns for each batch row and position; None if it has no such
    axes.

    Args:
        x: ``[batch, pos, ...]``, ``[pos, batch, ...]``, ``[batch, head, pos, d]``, ``[(batch pos),
            column]`` or ``[(batch pos), head, d]``.
        batch, pos: the sizes of these axes. The number of heads should differ from both, because
            the first matching layout is used.
    """
    if x.ndim in (2, 3) and len(x) == batch * pos:
        return x.flatten(1).unflatten(0, (batch, pos))
    if x.ndim < 3:
        return None
    if x.shape[:2] == (batch, pos):
        return x.flatten(2)
    if x.shape[:2] == (pos, batch):
        return x.transpose(0, 1).flatten(2)
    if x.ndim == 4 and x.shape[::2] == (batch, pos):
        return x.transpose(1, 2).flatten(2)
    return None


def _heads_by_rows(n_heads: int, batch: int) -> Iterator[Tensor]:
    """Yield the heads in groups of as many as there are batch rows: row i is used for the group's
    head i.
    """
    yield from torch.arange(n_heads, device="cpu").split(batch)


#: Largest number of keys whose scores are compared: the weights below are then exact integers in
#: every dtype.
MOST_KEYS = 8


def zero_sum_weights(n: int, like: Tensor) -> Float[Tensor, " n"]:
    """Return fixed non-zero weights whose sum is exactly zero: they cancel a row's constant and its
    maximum.

    Args:
        n: the number of weights, from two to `MOST_KEYS`.
        like: a tensor with the dtype and the device of the result.

    Raises:
        ValueError: `n` is out of this range.
    """
    if not 2 <= n <= MOST_KEYS:
        raise ValueError(f"scores of 2 to {MOST_KEYS} keys can be compared, not of {n}")
    return torch.tensor([*range(1, n), -n * (n - 1) // 2], device="cpu").to(like)


def gradients_of_scores(
    scores: Float[Tensor, "batch head query key"],
    outputs: Sequence[Tensor],
    *,
    query: int,
    keys: Sequence[int],
    query_pos: int,
    key_pos: int,
) -> _Reaches:
    """Return the columns of each output that reach each head's scores for one query, from the
    query's position and from the keys' positions.

    Args:
        scores: the softmax input, with its graph.
        outputs: tensors from which it may be computed, in layouts that `by_position` reads.
        query: the position of the query.
        keys: from two to `MOST_KEYS` key positions that the query may attend to. Exclude `query`
            itself for a fused projection: its columns for queries and keys are distinguished by
            position. Their scores are summed with weights that sum to zero.
        query_pos, key_pos: the number of positions of the outputs for queries (keys).

    Raises:
        ValueError: the number of keys is out of range, or the run had no gradients.
    """
    batch, n_heads = scores.shape[:2]
    weights = zero_sum_weights(len(keys), scores)
    from_query = [_Masks() for _ in outputs]
    from_keys = [_Masks() for _ in outputs]
    for heads in _heads_by_rows(n_heads, batch):
        rows = torch.arange(len(heads), device="cpu")
        total = (scores[rows, heads, query][:, list(keys)] * weights).sum()
        for i, gradient in enumerate(_gradients(total, outputs)):
            from_query[i].add(gradient, (batch, query_pos), len(heads), [query])
            from_keys[i].add(gradient, (batch, key_pos), len(heads), keys)
    return _Reaches(
        [masks.joined() for masks in from_query],
        [masks.joined() for masks in from_keys],
    )


class _Masks:
    """Collector of one output's masks, for one group of heads at a time."""

    def __init__(self) -> None:
        self._masks: list[Tensor] = []
        self._is_reached = True

    def add(
        self,
        gradient: Tensor | None,
        sizes: tuple[int, int],
        n_heads: int,
        positions: Sequence[int] | None = None,
    ) -> None:
        """Add the columns with a gradient for the heads of the first batch rows.

        Args:
            gradient: the gradient of the output, or None.
            sizes: the number of batch rows and positions.
            n_heads: the number of heads.
            positions: the positions to look at; None: all.
        """
        rows = None if gradient is None else by_position(gradient, *sizes)
        if rows is None:
            self._is_reached = False
            return
        if positions is not None:
            rows = rows[:, list(positions)]
        self._masks.append((rows[:n_heads] != 0).any(1))

    def joined(self) -> Reached:
        """Return the mask of all heads; None if no column reaches any head."""
        if not self._is_reached:
            return None
        mask = torch.cat(self._masks)
        return mask if bool(mask.any()) else None


def gradients_of_z(
    z: Float[Tensor, "batch query head d_head"],
    outputs: Sequence[Tensor],
    *,
    query: int,
    key_pos: int,
) -> list[Reached]:
    """Return the columns of each output that reach each head's `z` at one query, from any position.

    If the pattern is detached in the run, only the values' columns reach `z`.

    Args:
        z: the input of the output projection, with its graph.
        outputs: as for `gradients_of_scores`.
        query: the position of the query.
        key_pos: the number of positions of the outputs for values.
    """
    batch, _, n_heads, d_head = z.shape
    weights = torch.linspace(0.5, 1.5, d_head, dtype=torch.float64, device="cpu").to(z)
    reached = [_Masks() for _ in outputs]
    for heads in _heads_by_rows(n_heads, batch):
        rows = torch.arange(len(heads), device="cpu")
        total = (z[rows, query, heads] * weights).sum()
        for masks, gradient in zip(reached, _gradients(total, outputs), strict=True):
            masks.add(gradient, (batch, key_pos), len(heads))
    return [masks.joined() for masks in reached]


def _gradients(total: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    reaching = [x for x in outputs if x.requires_grad]
    if not total.requires_grad or not reaching:
        raise ValueError(
            "no gradient can be taken: the run has to be one with gradients, of every tensor asked"
            " about"
        )
    gradients = iter(torch.autograd.grad(total, reaching, retain_graph=True, allow_unused=True))
    return tuple(next(gradients) if x.requires_grad else None for x in outputs)


def either(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the union of two masks; None counts as empty."""
    if mask is None:
        return other
    if other is None:
        return mask
    return mask | other


def disjoint_sets(reached: Bool[Tensor, "head column"]) -> tuple[tuple[int, ...], ...] | None:
    """Return the columns of each head, or of each group of heads that share columns, in the order
    of the heads.

    None if the sets overlap, differ in size, or one of them is empty.

    Args:
        reached: a mask from `gradients_of_scores` or `gradients_of_z`.
    """
    sets = list(dict.fromkeys(tuple(row.nonzero().flatten().tolist()) for row in reached))
    sizes = {len(columns) for columns in sets}
    if len(sizes) != 1:
        return None
    if sizes == {0}:
        return None
    distinct = set().union(*sets)
    if len(distinct) == len(sets) * sizes.pop():
        return tuple(sets)
    return None


def gradient_of(total: Tensor, live: Tensor) -> Tensor | None:
    """Return the gradient of a number with respect to a module's input or output; None if the
    number does not depend on it.

    Raises:
        NotFound: the model has overwritten a tensor that the gradient needs.
    """
    if not total.requires_grad or not live.requires_grad:
        return None
    try:
        return torch.autograd.grad(total, [live], retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        raise NotFound(f"no gradient can be taken: {one_line(error)}") from None
