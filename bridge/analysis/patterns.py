"""Statistics of attention patterns, computed during the run, in memory linear in the prompt.

`vertical_scores` and `kurtosis` find heads that attend to few sentences, from the attention between
sentences that `PatternStatistics` computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.arguments import TokenPositions, positions_of, refuse_wrong_types
from bridge.hooks.context import CURRENT
from bridge.hooks.hooks import HookPoint
from bridge.rows import places_of, token_axis

__all__ = ["PatternStatistics", "kurtosis", "vertical_scores"]


class PatternStatistics:
    """Statistics of every attention pattern, query by query: a callback for `run_with_callback`.

    Patterns are passed in chunks of queries (``max_bytes=``), or whole. A second run raises an
    error: make one object for each run. Every number belongs to a head and a query: how much it
    attends to some keys, how widely (entropy, in nats), and which keys it attends to most. In
    models with attention sinks, rows sum to less than one, and the entropy is that of the remaining
    probabilities. Values for queries at padding have no meaning; padding counts nowhere else.

    Args:
        keys: the keys to which attention is recorded, such as ``[0]``; negative ones count from the
            end. Padding is not counted: each row has the keys that it has when run on its own.
        top: how many of the most attended keys are recorded.
        groups: groups of positions between which attention is averaged, such as
            ``spans.sentences()``; counted without padding.

    Attributes:
        entropy: by hook name, ``[batch, head, pos]``.
        attention: to each of `keys`, by hook name, ``[batch, head, pos, key]``.
        top_keys, top_weights: the most attended keys, and how much, by hook name, ``[batch, head,
            pos, top]``; their indices in the pattern, padding included.
        between: the mean attention from the queries of one group to the keys of another, by hook
            name, ``[batch, head, query_group, key_group]``.
        received: the total attention that each key gets from all queries, by hook name, ``[batch,
            head, key_pos]``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.patterns import PatternStatistics
        >>> bridge = TransformerBridge.boot_embedded()
        >>> statistics = PatternStatistics(keys=[0], top=2)
        >>> patterns = lambda name: name.endswith("hook_pattern")
        >>> _ = bridge.run_with_callback("Mary and John", statistics, patterns, max_bytes=2**25)
        >>> (
        ...     statistics.entropy["blocks.1.attn.hook_pattern"].shape,
        ...     statistics.top_keys["blocks.1.attn.hook_pattern"].shape,
        ... )
        (torch.Size([1, 4, 4]), torch.Size([1, 4, 4, 2]))
    """

    @refuse_wrong_types
    def __init__(
        self,
        keys: Sequence[int] | TokenPositions = (),
        top: int = 0,
        groups: Sequence[TokenPositions | Sequence[int]] = (),
    ) -> None:
        if top < 0:
            raise ValueError(f"top is {top}; it must be 0 or more")
        self.keys, self.top = list(positions_of(keys)), top
        self.groups = [list(dict.fromkeys(positions_of(group))) for group in groups]
        if any(not group or min(group) < 0 for group in self.groups):
            raise ValueError("groups are of positions from 0 on, with at least one in each")
        self._sums: dict[str, Tensor] = {}
        self._held: dict[str, list[Tensor]] = {}
        self._n_queries: dict[str, int] = {}
        self._run: object = None
        self.received: dict[str, Float[Tensor, "batch head key_pos"]] = {}

    def __call__(self, pattern: Float[Tensor, "batch head some key_pos"], point: HookPoint) -> None:
        """Add the statistics of some queries of a pattern.

        Args:
            pattern: the pattern; scores raise an error.
            point: its hook point.

        Raises:
            ValueError: it is not a pattern, or comes from a different run from the earlier ones; or
                a padded row is too short for the keys.
            IndexError: the keys are out of range.
        """
        if not point.name.endswith("hook_pattern"):
            raise ValueError(f"{point.name} is no pattern: choose names that end in 'hook_pattern'")
        length = pattern.shape[-1]
        if any(not -length <= key < length for key in self.keys) or self.top > length:
            raise IndexError(
                f"keys are {self.keys} and top is {self.top}; {point.name} has {length} keys"
            )
        wide = pattern.float() if pattern.dtype != torch.float64 else pattern
        real_queries, real_keys = self._tokens(pattern, point)
        if real_queries is None:
            received = wide.sum(2)
        else:
            received = torch.einsum("bhqk,bq->bhk", wide, real_queries.to(wide))
        self._check_run(point.name, received)
        if self.groups:
            self._add_groups(wide, point, real_keys)
        top = wide.topk(self.top, -1)
        if point.name in self.received:
            # In place: allocating a new sum for each piece would leave no memory for the next one.
            self.received[point.name].add_(received)
        else:
            self.received[point.name] = received
        entropy = torch.special.entr(wide).sum(-1)
        statistics = (entropy, self._to_keys(wide, real_keys), top.indices, top.values)
        self._put(point.name, statistics, max(length, pattern.shape[2]))

    def _tokens(self, pattern: Tensor, point: HookPoint) -> tuple[Tensor | None, Tensor | None]:
        """Return which of the queries shown, and which keys, are no padding, ``[row, token]``; None
        where none is.
        """
        run = CURRENT.get().run
        if run is None or run.rows is None:
            return None, None
        _, _, of_queries, of_keys = point.point.axes.split()
        real_keys = run.rows.real(of_keys, pattern.shape[-1], len(pattern))
        if token_axis(of_keys) == of_queries:
            real_queries = real_keys
        else:
            real_queries = run.rows.masks.get(of_queries)
        if real_queries is None:
            return None, real_keys
        start = run.past + self._n_queries.get(point.name, 0)
        return real_queries[:, start : start + pattern.shape[2]], real_keys

    def _to_keys(self, pattern: Tensor, real: Tensor | None) -> Tensor:
        """Return the attention to the keys that are asked for, counted among each row's tokens."""
        if real is None or not self.keys:
            return pattern[..., self.keys]
        places = torch.stack([places_of(real, key, real.shape) for key in self.keys], -1)
        index = places.to(pattern.device)[:, None, None].expand(*pattern.shape[:3], -1)
        return pattern.gather(-1, index)

    def _add_groups(self, pattern: Tensor, point: HookPoint, real: Tensor | None) -> None:
        """Add the attention of some queries between groups.

        Raises:
            ValueError: queries and keys are different tokens.
            IndexError: a row has no such position.
        """
        _, _, of_queries, of_keys = point.point.axes.split()
        if token_axis(of_keys) != of_queries:
            raise ValueError(
                f"{point.name} attends from other tokens than it attends to, so groups of positions"
                " are not of both: leave groups= out, or choose other names"
            )
        length = pattern.shape[-1]
        shortest = length if real is None else int(real.sum(-1).min())
        if max(map(max, self.groups)) >= shortest:
            raise IndexError(f"groups go to position {max(map(max, self.groups))} of {shortest}")
        run = CURRENT.get().run
        start = (0 if run is None else run.past) + self._n_queries.get(point.name, 0)
        queries = torch.arange(start, start + pattern.shape[2], device=pattern.device)
        order = None  # of each row's tokens, before its padding
        if real is not None:
            order = real.to(pattern.device).logical_not().byte().argsort(dim=-1, stable=True)
        places = [torch.tensor([group], device=pattern.device) for group in self.groups]
        places = [place if order is None else order[:, place[0]] for place in places]
        to_groups = torch.stack([_summed(pattern, place) for place in places], -1)
        from_groups = [(queries[:, None] == place[:, None]).any(-1) for place in places]
        member = torch.stack(from_groups, -1).to(pattern).expand(len(pattern), -1, -1)
        sums = torch.einsum("bhqk,bqg->bhgk", to_groups, member)
        known = self._sums.get(point.name)
        self._sums[point.name] = sums if known is None else known.add_(sums)

    def _check_run(self, name: str, received: Tensor) -> None:
        """Reject a second run, and remember the first."""
        run = CURRENT.get().run
        known = self.received.get(name)
        is_second = bool(self.received) and run is not self._run
        if is_second or (known is not None and known.shape != received.shape):
            raise ValueError(
                f"{name} comes of a second run, whose queries would be added to those of the first:"
                " make a PatternStatistics() for each run"
            )
        self._run = run

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_run": None}  # not stored on the object, which is shared by runs

    def _put(self, name: str, statistics: tuple[Tensor, ...], room: int) -> None:
        """Append the statistics of some queries to those of the earlier queries.

        The results are not stored in a new tensor for each piece: that tensor would occupy part of
        the memory freed by the previous piece, so that the next piece would not fit there, and the
        process would need as much memory as for a whole pattern.
        """
        before = self._n_queries.get(name, 0)
        end = before + statistics[0].shape[2]
        held = self._held.get(name)
        if held is None or held[0].shape[2] < end:
            size = max(room, 2 * before, end)
            larger = [x.new_empty((*x.shape[:2], size, *x.shape[3:])) for x in statistics]
            for new, old in zip(larger, held or (), strict=held is not None):
                new[:, :, :before] = old[:, :, :before]
            held = self._held[name] = larger
        for of_all, piece in zip(held, statistics, strict=True):
            of_all[:, :, before:end] = piece
        self._n_queries[name] = end

    def _joined(self, which: int) -> dict[str, Tensor]:
        return {
            name: held[which][:, :, : self._n_queries[name]] for name, held in self._held.items()
        }

    @property
    def between(self) -> dict[str, Float[Tensor, "batch head query_group key_group"]]:
        """See above."""
        sizes = torch.tensor([len(group) for group in self.groups], device="cpu")
        counts = sizes[:, None] * sizes
        return {name: sums / counts.to(sums) for name, sums in self._sums.items()}

    @property
    def entropy(self) -> dict[str, Float[Tensor, "batch head pos"]]:
        """See above."""
        return self._joined(0)

    @property
    def attention(self) -> dict[str, Float[Tensor, "batch head pos key"]]:
        """See above."""
        return self._joined(1)

    @property
    def top_keys(self) -> dict[str, Int[Tensor, "batch head pos top"]]:
        """See above."""
        return self._joined(2)

    @property
    def top_weights(self) -> dict[str, Float[Tensor, "batch head pos top"]]:
        """See above."""
        return self._joined(3)


def _summed(pattern: Tensor, place: Tensor) -> Tensor:
    """Return the attention to the keys of a group, ``[row head query]``.

    Args:
        pattern: the pattern.
        place: the group's keys, for all rows or for each, ``[row key]``.
    """
    if len(place) == 1:
        return pattern[..., place[0]].sum(-1)
    index = place[:, None, None].expand(*pattern.shape[:3], -1)
    return pattern.gather(-1, index).sum(-1)


# --------------------------------------------------------------------------------------------------
# Heads that attend to few sentences.
# --------------------------------------------------------------------------------------------------


@refuse_wrong_types
def vertical_scores(
    between: Float[Tensor, "*batch sentence sentence"], nearest: int = 4, *, ranks: bool = False
) -> Float[Tensor, "*batch sentence"]:
    """Return how much later sentences attend to each sentence, the nearest ones aside (Bogdan et
    al. 2025, "Thought Anchors").

    Args:
        between: attention from sentences (rows) to sentences, such as ``between`` of
            `PatternStatistics`.
        nearest: the number of rows that are left out, with the sentence itself.
        ranks: first replace each row by the ranks of its entries, as shares of their number, so
            that late sentences, whose rows have more entries, count as much.

    Returns:
        The mean of each column; NaN for the last `nearest` sentences, which no row is left for.

    Raises:
        ValueError: `nearest` is negative.

    Example:
        >>> import torch
        >>> from bridge.analysis.patterns import vertical_scores
        >>> between = torch.tensor([[0.5, 0.0, 0.0], [0.2, 0.4, 0.0], [0.6, 0.2, 0.1]])
        >>> vertical_scores(between, 1)
        tensor([0.4000, 0.2000,    nan])
    """
    n = between.shape[-1]
    if nearest < 0:
        raise ValueError(f"nearest is {nearest}; it must be 0 or more")
    below = torch.ones(n, n, dtype=torch.bool, device=between.device).tril(-nearest)
    values = _ranked(between, below) if ranks else between
    return values.masked_fill(~below, 0).sum(-2) / below.sum(-2)


def _ranked(matrix: Tensor, counted: Tensor) -> Tensor:
    """Return the rank of each counted entry in its row, as a share; equal entries share one."""
    ranked = torch.zeros_like(matrix)
    for row, kept in enumerate(counted):
        entries = matrix[..., row, kept]
        less = (entries.unsqueeze(-2) < entries.unsqueeze(-1)).sum(-1)
        equal = (entries.unsqueeze(-2) == entries.unsqueeze(-1)).sum(-1)
        ranked[..., row, kept] = (less + (equal + 1) / 2).to(matrix) / max(1, entries.shape[-1])
    return ranked


@refuse_wrong_types
def kurtosis(scores: Float[Tensor, "*batch sentence"]) -> Float[Tensor, "*batch"]:
    """Return the excess kurtosis of each head's `vertical_scores`: large if few sentences receive
    most of its attention (receiver heads).

    Args:
        scores: the scores; NaN is left out.

    Example:
        >>> import torch
        >>> from bridge.analysis.patterns import kurtosis
        >>> kurtosis(torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, torch.nan]]))
        tensor([ 0.2500, -2.0000])
    """
    wide = scores.cpu().double()
    deviations = wide - wide.nanmean(-1, keepdim=True)
    variance = (deviations**2).nanmean(-1)
    return ((deviations**4).nanmean(-1) / variance**2 - 3).to(scores)
