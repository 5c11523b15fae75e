"""Scores and patterns: the model's filler, ALiBi, attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from adapters.views.base import Call, View


class MaskedScores(View):
    """Attention scores before the softmax; the model's large negative filler is shown as ``-inf``.

    Written back, ``-inf`` means what it says (no attention). Rows in which the model itself allows nothing (padding)
    keep the model's filler, so that reading and writing back changes nothing.
    """

    identity = False
    deferrable = True
    by_row = True

    def masked(self, x: Tensor) -> Tensor:
        # Some models scale the filler, too. In float16 there is not much room for that.
        return x < torch.finfo(x.dtype).min / (2 if x.dtype == torch.float16 else 1e8)

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.masked_fill(self.masked(x), float("-inf"))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        nothing_allowed = self.masked(x).all(-1, keepdim=True)
        return torch.where(nothing_allowed & new.isneginf(), x, new)


@dataclass(frozen=True)
class FilledScores(MaskedScores):
    """Scores of a model whose filler is not very large: what is `below` this number is none."""

    below: float

    def masked(self, x: Tensor) -> Tensor:
        return x < self.below


class AlibiScores(MaskedScores):
    """Scores to which the model added ``slope * key position``, shown with ``slope * (key position - query position)``.

    The two differ by a constant for each query, which the softmax does not see; a value that is read and written back
    differs by rounding. The module is given ``alibi``, ``[(batch head), 1, key_pos]``.
    """

    deferrable = by_row = False

    @staticmethod
    def at_query(x: Tensor, call: Call) -> Tensor:
        batch, _, queries, keys = x.shape
        return rearrange(call.kwargs["alibi"][..., keys - queries :], "(b h) 1 k -> b h k 1", b=batch)

    def get(self, x: Tensor, call: Call) -> Tensor:
        return super().get(x, call) - self.at_query(x, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return super().put(x, new + self.at_query(x, call), call)


class SinkPattern(View):
    """A pattern without the attention sink's column, which is the last: rows sum to less than one.

    Args:
        sinks: the name of the attention module's parameter that holds each head's sink.
    """

    identity = False
    by_row = True

    def __init__(self, sinks: str) -> None:
        self.sinks = sinks

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x[..., :-1]

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return torch.cat([new, x[..., -1:]], dim=-1)


class SinkScores(View):
    """Scores without the attention sink's column, which is the last.

    A model may take each row's maximum from it, to keep the exponentials small. Then the sink's column says how much
    that was, and it is added back: scores are those of the queries and keys. A value that is read and written back
    differs by rounding.

    Args:
        inner: the view of the scores.
        sinks: as for `SinkPattern`.
    """

    identity = False
    contextual = True

    def __init__(self, inner: View, sinks: str) -> None:
        self.inner, self.sinks = inner, sinks
        self.by_row = inner.identity or inner.by_row
        self.parameters = (sinks,)

    def taken(self, x: Tensor, call: Call) -> Tensor:
        """What the model took from each row, ``[batch, head, query, 1]``."""
        sinks = call.scratch[self.sinks] if self.sinks in call.scratch else getattr(call.module, self.sinks)
        return sinks.view(-1, 1, 1) - x[..., -1:]

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x[..., :-1], call) + self.taken(x, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        scores = self.inner.put(x[..., :-1], new - self.taken(x, call), call)
        return torch.cat([scores, x[..., -1:]], dim=-1)
