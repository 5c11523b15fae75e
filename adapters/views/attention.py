"""Where the heads lie in a tensor: in the columns of a projection, next to the batch, before the positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from adapters.views.views import Call, View, split


@dataclass(frozen=True, repr=False)
class Heads(View):
    """``... (head d_head) -> ... head d_head``."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return split(x, self.n_heads)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(-2)


@dataclass(frozen=True, repr=False)
class FlatPatches(View):
    """``batch d_model row column -> batch patch d_model``: row by row."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2).reshape(x.shape)


class Selected(View):
    """A part of a fused projection: `get` returns a view of its argument, which can be written to."""

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        whole = x.clone()
        self.get(whole, call).copy_(new)
        return whole


@dataclass(frozen=True)
class columns(Selected):
    """Columns `start` to `stop` of the last axis, split into heads where `n_heads` is given."""

    start: int
    stop: int
    n_heads: int | None = None
    by_row = True

    def get(self, x: Tensor, call: Call) -> Tensor:
        part = x[..., self.start : self.stop]
        return part if self.n_heads is None else split(part, self.n_heads)


@dataclass(frozen=True)
class interleaved(Selected):
    """Part `index` of a projection laid out as ``(head part d_head)`` (GPT-NeoX, BLOOM)."""

    n_heads: int
    index: int
    parts: int = 3

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.parts, -1)).select(-2, self.index)


@dataclass(frozen=True)
class gathered(View):
    """Columns of the last axis in any order: ``rows`` has those of each head, or, if `flat`, one row for all."""

    rows: tuple[tuple[int, ...], ...]
    flat: bool = False

    def _index(self, x: Tensor) -> Tensor:
        return torch.tensor(self.rows[0] if self.flat else self.rows, device=x.device)

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x[..., self._index(x)]

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        whole = x.clone()
        whole[..., self._index(x)] = new
        return whole


class OneHead(View):
    """``batch 1 pos d -> batch pos d``: a latent that is kept as one head of keys. Two axes stay as they are."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.squeeze(1) if x.ndim == 4 else x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.unsqueeze(1) if x.ndim == 4 else new


class HeadsFirst(View):
    """``batch head pos d_head -> batch pos head d_head`` (inside the attention interface)."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2)


@dataclass(frozen=True)
class HeadsOfBatch(View):
    """``(batch head) pos key_pos -> batch head pos key_pos``."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.unflatten(0, (-1, self.n_heads))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(0, 1)


@dataclass(frozen=True)
class Biased(View):
    """Heads of a projection with a bias that its module's parent adds: a parameter of the last source's module.

    Attributes:
        heads: how the projection's output shows them.
        name: of the parameter, ``(head d_head)``, or one number for each head.
    """

    heads: View
    name: str
    contextual = True

    def _bias(self, like: Tensor, call: Call) -> Tensor:
        bias = call.sources[-1][0].get_parameter(self.name)
        return bias.view(like.shape[-2], -1).to(like)

    def get(self, x: Tensor, call: Call) -> Tensor:
        made = self.heads.get(x, call)
        return made + self._bias(made, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.heads.put(x, new - self._bias(new, call), call)


# ----------------------------------------------------------------------------------------------------------------------
# Scores and patterns: the model's filler, ALiBi, attention sinks.
# ----------------------------------------------------------------------------------------------------------------------


class MaskedScores(View):
    """Attention scores before the softmax; the model's large negative filler is shown as ``-inf``.

    Written back, ``-inf`` means what it says (no attention). Rows in which the model itself allows nothing (padding)
    keep the model's filler, so that reading and writing back changes nothing.
    """

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


class SinkScores(View):
    """Scores without the attention sink's column, which is the last.

    A model may take each row's maximum from it, to keep the exponentials small. Then the sink's column says how much
    that was, and it is added back: scores are those of the queries and keys. A value that is read and written back
    differs by rounding.

    Args:
        inner: the view of the scores.
        sinks: the name of the attention module's parameter that holds each head's sink.
    """

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


# ----------------------------------------------------------------------------------------------------------------------
# What torch's attention kernel is called with.
# ----------------------------------------------------------------------------------------------------------------------


class KernelArguments(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, by its names and in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def of(self, kernel: Callable[..., Tensor]) -> Tensor:
        """What a kernel makes of them."""
        query, key, value, mask, dropped, causal, scale, grouped = self
        return kernel(query, key, value, mask, dropped, causal, scale=scale, enable_gqa=grouped)
