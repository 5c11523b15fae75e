"""Statistics of attention patterns that are read and not kept, in memory that grows with the prompt, not its square."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.context import CURRENT
from bridge.hooks.hooks import HookPoint

__all__ = ["PatternStatistics"]


class PatternStatistics:
    """What is asked of each query of every pattern that it is shown: a callback of `run_with_callback`.

    Patterns come some queries after the other (``max_bytes=``), or whole; those of a second run are refused: make one
    for each run. Every number is of a head and a query: how much it attends to some keys, how widely
    (entropy, in nats), and to which keys the most. Rows of models with attention sinks sum to less than one, and the
    entropy is of what there is.

    Args:
        keys: attention to which keys is summed up, one by one, such as ``[0]``; from the end if negative.
        top: how many of the keys that are attended to the most are named.

    Attributes:
        entropy: by hook name, ``[batch, head, pos]``.
        attention: to each of `keys`, by hook name, ``[batch, head, pos, key]``.
        top_keys, top_weights: the most attended keys, and how much, by hook name, ``[batch, head, pos, top]``.
        received: how much attention each key gets of all queries together, by hook name, ``[batch, head, key_pos]``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.patterns import PatternStatistics
        >>> bridge = TransformerBridge.boot_embedded()
        >>> seen = PatternStatistics(keys=[0], top=2)
        >>> patterns = lambda name: name.endswith("hook_pattern")
        >>> _ = bridge.run_with_callback("Mary and John went to", seen, patterns, max_bytes=2**25)
        >>> seen.entropy["blocks.1.attn.hook_pattern"].shape, seen.top_keys["blocks.1.attn.hook_pattern"].shape
        (torch.Size([1, 4, 6]), torch.Size([1, 4, 6, 2]))
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
        """Takes in some queries of a pattern.

        Args:
            pattern: the pattern; scores are refused.
            point: its hook point.

        Raises:
            ValueError: it is no pattern, or of another run than the ones before.
            IndexError: there are no such keys, or not so many.
        """
        if not point.name.endswith("hook_pattern"):
            raise ValueError(f"{point.name} is no pattern: choose names that end in 'hook_pattern'")
        length = pattern.shape[-1]
        if any(not -length <= key < length for key in self.keys) or self.top > length:
            raise IndexError(f"keys are {self.keys} and top is {self.top}; {point.name} has {length} keys")
        wide = pattern.float() if pattern.dtype != torch.float64 else pattern
        received, known, run = wide.sum(2), self.received.get(point.name), CURRENT.get().run
        again = self.received and run is not self._run
        if again or (known is not None and known.shape != received.shape):
            raise ValueError(
                f"{point.name} comes of a second run, whose queries would be added to those of the first: make a "
                "PatternStatistics() for each run"
            )
        self._run = run
        top = wide.topk(self.top, -1)
        if known is None:
            self.received[point.name] = received
        else:
            known += received  # in place: a new sum in the room of each piece would leave none for the next
        found = (torch.special.entr(wide).sum(-1), wide[..., self.keys], top.indices, top.values)
        self._put(point.name, found, max(length, pattern.shape[2]))

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_run": None}  # a run is none of what it has found

    def _put(self, name: str, found: tuple[Tensor, ...], room: int) -> None:
        """Puts what was found of some queries behind what was found of those before.

        Tensors that stay, one for each piece, would stand in the room that the piece before has left, and the next
        piece would not fit into what is left of it: the process would hold as much as of a whole pattern.
        """
        before, end = self._n_queries.get(name, 0), self._n_queries.get(name, 0) + found[0].shape[2]
        held = self._held.get(name)
        if held is None or held[0].shape[2] < end:
            more = [x.new_empty((*x.shape[:2], max(room, 2 * before, end), *x.shape[3:])) for x in found]
            for new, old in zip(more, held or (), strict=held is not None):
                new[:, :, :before] = old[:, :, :before]
            held = self._held[name] = more
        for whole, piece in zip(held, found, strict=True):
            whole[:, :, before:end] = piece
        self._n_queries[name] = end

    def _joined(self, which: int) -> dict[str, Tensor]:
        return {name: held[which][:, :, : self._n_queries[name]] for name, held in self._held.items()}

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
