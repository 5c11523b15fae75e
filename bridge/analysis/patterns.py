"""Statistics of attention patterns, computed during the run, in memory linear in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.arguments import refuse_wrong_types
from bridge.hooks.context import CURRENT
from bridge.hooks.hooks import HookPoint
from bridge.rows import places_of, token_axis

__all__ = ["PatternStatistics"]


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

    Attributes:
        entropy: by hook name, ``[batch, head, pos]``.
        attention: to each of `keys`, by hook name, ``[batch, head, pos, key]``.
        top_keys, top_weights: the most attended keys, and how much, by hook name, ``[batch, head,
            pos, top]``; their indices in the pattern, padding included.
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
    def __init__(self, keys: Sequence[int] = (), top: int = 0) -> None:
        if top < 0:
            raise ValueError(f"top is {top}; it must be 0 or more")
        self.keys, self.top = list(keys), top
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
