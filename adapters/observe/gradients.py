"""Which columns of a projection's output reach a head's scores, and its `z`: by gradient, whatever lies between.

Each batch row asks about another head, so that one backward pass answers for as many heads as there are rows. All
functions take tensors of one run that still have their graph, and know nothing of a family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.observe.observe import NotFound, one_line

#: Of one tensor: for each head, which of its columns reach that head. None: none of them does, for no head.
Reached = Bool[Tensor, "head column"] | None


class Reaches(NamedTuple):
    """For each tensor that was asked about, what reaches the scores from the query's position and from the keys'."""

    from_query: list[Reached]
    from_keys: list[Reached]


def by_position(x: Tensor, batch: int, pos: int) -> Float[Tensor, "batch pos column"] | None:
    """A tensor as a row of columns for each batch row and position, None where it has no such axes.

    Args:
        x: ``[batch, pos, ...]``, ``[pos, batch, ...]``, ``[batch, head, pos, d]``, ``[(batch pos), column]`` or
            ``[(batch pos), head, d]``.
        batch, pos: the sizes to look for; the numbers of heads should be neither, or the first reading that fits wins.
    """
    if x.ndim >= 3 and x.shape[:2] == (batch, pos):
        return x.flatten(2)
    if x.ndim >= 3 and x.shape[:2] == (pos, batch):
        return x.transpose(0, 1).flatten(2)
    if x.ndim == 4 and x.shape[0] == batch and x.shape[2] == pos:
        return x.transpose(1, 2).flatten(2)
    if x.ndim in (2, 3) and x.shape[0] == batch * pos:
        return x.flatten(1).unflatten(0, (batch, pos))
    return None


def _heads_by_rows(n_heads: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch rows and the heads that they ask about, as many at once as there are rows."""
    for start in range(0, n_heads, batch):
        heads = torch.arange(start, min(start + batch, n_heads))
        yield torch.arange(len(heads)), heads


#: Of so many keys the scores are compared at most: the weights below are then whole numbers in every type.
MOST_KEYS = 8


def zero_sum_weights(n: int, like: Tensor) -> Float[Tensor, " n"]:
    """Fixed weights, none of them zero, whose sum is exactly zero: a row's constant and its maximum drop out.

    Args:
        n: how many, from two to `MOST_KEYS`.
        like: a tensor of the type and on the device that they are to have.

    Raises:
        ValueError: there are fewer or more.
    """
    if not 2 <= n <= MOST_KEYS:
        raise ValueError(f"scores of 2 to {MOST_KEYS} keys can be compared, not of {n}")
    return torch.tensor([*range(1, n), -n * (n - 1) // 2]).to(like)


def gradients_of_scores(
    scores: Float[Tensor, "batch head query key"],
    outputs: Sequence[Tensor],
    *,
    query: int,
    keys: Sequence[int],
    query_pos: int,
    key_pos: int,
) -> Reaches:
    """Which columns of each output reach each head's scores of one query, and from which side.

    Args:
        scores: what enters the softmax, with its graph.
        outputs: tensors that it may have been made from, of layouts that `by_position` reads.
        query: the position of the query.
        keys: positions of keys, from two to `MOST_KEYS`, that the query may attend to; not `query` itself, where a
            projection is fused: its columns for queries and keys are told apart by the position. A sum of their scores
            is taken whose weights sum to zero.
        query_pos, key_pos: how many positions the outputs have that queries (keys) are made from.

    Raises:
        ValueError: there are fewer keys, or more; or the run was one without gradients.
    """
    batch, n_heads = scores.shape[:2]
    weights = zero_sum_weights(len(keys), scores)
    from_query: list[list[Tensor | None]] = [[] for _ in outputs]
    from_keys: list[list[Tensor | None]] = [[] for _ in outputs]
    for rows, heads in _heads_by_rows(n_heads, batch):
        total = (scores[rows, heads, query][:, list(keys)] * weights).sum()
        for i, gradient in enumerate(_gradients(total, outputs)):
            for found, length, positions in ((from_query, query_pos, [query]), (from_keys, key_pos, list(keys))):
                seen = None if gradient is None else by_position(gradient, batch, length)
                found[i].append(None if seen is None else (seen[rows][:, positions] != 0).any(1))
    return Reaches([_joined(found) for found in from_query], [_joined(found) for found in from_keys])


def gradients_of_z(
    z: Float[Tensor, "batch query head d_head"], outputs: Sequence[Tensor], *, query: int, key_pos: int
) -> list[Reached]:
    """Which columns of each output reach each head's `z` at one query, from any position.

    With the pattern detached in the run these are the values' columns, and no others.

    Args:
        z: what enters the output projection, with its graph.
        outputs: as for `gradients_of_scores`.
        query: the position of the query.
        key_pos: how many positions the outputs have that values are made from.
    """
    batch, _, n_heads, d_head = z.shape
    weights = torch.linspace(0.5, 1.5, d_head, dtype=torch.float64).to(z)
    found: list[list[Tensor | None]] = [[] for _ in outputs]
    for rows, heads in _heads_by_rows(n_heads, batch):
        total = (z[rows, query, heads] * weights).sum()
        for i, gradient in enumerate(_gradients(total, outputs)):
            seen = None if gradient is None else by_position(gradient, batch, key_pos)
            found[i].append(None if seen is None else (seen[rows] != 0).any(1))
    return [_joined(each) for each in found]


def _gradients(total: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    reaching = [x for x in outputs if x.requires_grad]
    if not total.requires_grad or not reaching:
        raise ValueError("no gradient can be taken: the run has to be one with gradients, of every tensor asked about")
    found = iter(torch.autograd.grad(total, reaching, retain_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in outputs)


def _joined(found: Sequence[Tensor | None]) -> Reached:
    masks = [mask for mask in found if mask is not None]
    if len(masks) < len(found) or not any(bool(mask.any()) for mask in masks):
        return None
    return torch.cat(masks)


def either(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What one of two says that is reached."""
    return other if mask is None else mask if other is None else mask | other


def disjoint_sets(reached: Bool[Tensor, "head column"]) -> tuple[tuple[int, ...], ...] | None:
    """The columns of each head, or of each group of heads that read the same ones, in the order of the heads.

    None where that is not what it looks like: the sets overlap or differ in size, or one of them is empty.

    Args:
        reached: as `gradients_of_scores` and `gradients_of_z` find it.
    """
    sets = list(dict.fromkeys(tuple(row.nonzero().flatten().tolist()) for row in reached))
    columns = [column for each in sets for column in each]
    if len({len(each) for each in sets}) != 1 or not columns or len(set(columns)) != len(columns):
        return None
    return tuple(sets)


def gradient_of(total: Tensor, live: Tensor) -> Tensor | None:
    """The gradient of a number with respect to what a module was given or returned; None where that has no part in it.

    Raises:
        NotFound: the model has written over what the gradient is made from.
    """
    if not total.requires_grad or not live.requires_grad:
        return None
    try:
        return torch.autograd.grad(total, [live], retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        raise NotFound(f"no gradient can be taken: {one_line(error)}") from None


def is_linear_through(made: Tensor, through: Tensor, source: Tensor) -> bool:
    """Whether `made` is linear in `through`, and `source` reaches it that way alone.

    Args:
        made: what is made.
        through: a tensor on the way.
        source: what that is made from.
    """
    total = made.pow(2).sum()
    reached, whole = gradient_of(total, through), gradient_of(total, source)
    if reached is None or whole is None:
        return False
    (via,) = torch.autograd.grad(through, [source], [reached], retain_graph=True)
    # Euler: along `through`, the square of what is linear in it grows by twice itself.
    grows = (reached * through).sum() / total - 2
    return abs(float(grows.detach())) < 1e-4 and bool(((via - whole).abs() <= 1e-4 * whole.abs().max()).all())
