"""Where the heads lie in a tensor: in the columns of a projection, next to the batch, before the
positions.
"""

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
    """Heads in columns: ``... (head d_head) -> ... head d_head``."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return split(x, self.n_heads)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(-2)


@dataclass(frozen=True, repr=False)
class FlatPatches(View):
    """Patches of an image, in row-major order: ``batch d_model row column -> batch patch
    d_model``."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2).reshape(x.shape)


class Selected(View):
    """A part of a fused projection: `get` returns a writable view of its argument."""

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        edited = x.clone()
        self.get(edited, call).copy_(new)
        return edited


@dataclass(frozen=True)
class columns(Selected):
    """Columns `start` to `stop` of the last axis, split into heads if `n_heads` is given."""

    start: int
    stop: int
    n_heads: int | None = None
    by_row = True

    def get(self, x: Tensor, call: Call) -> Tensor:
        selected = x[..., self.start : self.stop]
        return selected if self.n_heads is None else split(selected, self.n_heads)


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
    """Columns of the last axis in any order: ``rows`` holds the columns of each head, or, if
    `flat`, one row for all.
    """

    rows: tuple[tuple[int, ...], ...]
    flat: bool = False

    def _index(self, x: Tensor) -> Tensor:
        rows = self.rows[0] if self.flat else self.rows
        return torch.tensor(rows, device=x.device)

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x[..., self._index(x)]

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        edited = x.clone()
        edited[..., self._index(x)] = new
        return edited


class OneHead(View):
    """A latent stored as one key head: ``batch 1 pos d -> batch pos d``. Tensors without the axis
    of size one are unchanged.
    """

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.squeeze(1) if x.ndim == 4 else x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.unsqueeze(1) if x.ndim == 4 else new


class HeadsFirst(View):
    """Heads before positions: ``batch head pos d_head -> batch pos head d_head`` (inside the
    attention interface).
    """

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2)


@dataclass(frozen=True)
class HeadsOfBatch(View):
    """Heads merged into the batch axis: ``(batch head) pos key_pos -> batch head pos key_pos``."""

    n_heads: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.unflatten(0, (-1, self.n_heads))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(0, 1)


@dataclass(frozen=True)
class Biased(View):
    """The heads of a projection, including a bias that another module adds to its output.

    The bias is a parameter of that other module, which is the last of the hook point's source sites
    (`Call.sources`).

    Attributes:
        heads: the view of the heads in the projection's output.
        name: the name of the parameter, which is ``(head d_head)`` or has one number for each head.
    """

    heads: View
    name: str
    contextual = True

    def _bias(self, like: Tensor, call: Call) -> Tensor:
        bias = call.sources[-1][0].get_parameter(self.name)
        return bias.view(like.shape[-2], -1).to(like)

    def get(self, x: Tensor, call: Call) -> Tensor:
        heads = self.heads.get(x, call)
        return heads + self._bias(heads, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.heads.put(x, new - self._bias(new, call), call)


# --------------------------------------------------------------------------------------------------
# Scores and patterns: the model's filler, ALiBi, attention sinks.
# --------------------------------------------------------------------------------------------------


class MaskedScores(View):
    """Attention scores before the softmax; the large negative number with which the model masks
    keys is shown as ``-inf``. When written back, ``-inf`` masks the key. Rows in which the model
    masks every key (padding) keep the model's number, so that reading and writing back changes
    nothing.
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
    """Scores of a model whose mask value is not very large: values `below` this number count as
    masked."""

    below: float

    def masked(self, x: Tensor) -> Tensor:
        return x < self.below


class AlibiScores(MaskedScores):
    """Scores to which the model added ``slope * key position``, shown with ``slope * (key position
    - query position)``.

    The two differ by a constant for each query, which does not affect the softmax; a value that is
    read and written back differs by rounding. The module receives ``alibi``, ``[(batch head), 1,
    key_pos]``.
    """

    deferrable = by_row = False

    @staticmethod
    def query_bias(x: Tensor, call: Call) -> Tensor:
        """Return ``slope * query position``, ``[batch, head, query, 1]``."""
        batch, _, queries, keys = x.shape
        alibi = call.kwargs["alibi"][..., keys - queries :]
        return rearrange(alibi, "(b h) 1 k -> b h k 1", b=batch)

    def get(self, x: Tensor, call: Call) -> Tensor:
        return super().get(x, call) - self.query_bias(x, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return super().put(x, new + self.query_bias(x, call), call)


class SinkScores(View):
    """Scores without the attention sink's column, which is the last.

    A model may subtract each row's maximum to keep the exponentials small. The sink's column then
    shows how much was subtracted, and it is added back, so that the scores are the scaled query-key
    products. A value that is read and written back differs by rounding.

    Args:
        inner: the view of the scores.
        sinks: the name of the attention module's parameter that holds each head's sink.
    """

    contextual = True

    def __init__(self, inner: View, sinks: str) -> None:
        self.inner = inner
        self.sinks = sinks
        self.by_row = inner.identity or inner.by_row
        self.parameters = (sinks,)

    def taken(self, x: Tensor, call: Call) -> Tensor:
        """Return the row maximum that the model subtracted, ``[batch, head, query, 1]``."""
        sinks = call.scratch.get(self.sinks)
        if sinks is None:
            sinks = getattr(call.module, self.sinks)
        return sinks.view(-1, 1, 1) - x[..., -1:]

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x[..., :-1], call) + self.taken(x, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        scores = self.inner.put(x[..., :-1], new - self.taken(x, call), call)
        return torch.cat([scores, x[..., -1:]], dim=-1)


# --------------------------------------------------------------------------------------------------
# The arguments of torch's attention kernel.
# --------------------------------------------------------------------------------------------------


class KernelArguments(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, with its names and in
    its order.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def of(self, kernel: Callable[..., Tensor]) -> Tensor:
        """Return the result of a kernel for these arguments."""
        query, key, value, mask, dropped, causal, scale, grouped = self
        return kernel(query, key, value, mask, dropped, causal, scale=scale, enable_gqa=grouped)
