"""Views: how the tensor at a site is seen as a canonical activation, and how a new value is written back.

A view has ``get(x, call)`` (site tensor to activation) and ``put(x, new, call)`` (site tensor and new activation to new
site tensor). `call` describes the module call in progress; most views ignore it. ``put(x, get(x))`` equals ``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

#: What a module is called with.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(slots=True)
class Call:
    """One call of a hooked module, as the views see it.

    Attributes:
        module: the module being called.
        args, kwargs: what it was called with.
        sources: for each of the point's source sites, the module that was called there and the tensor seen there.
        scratch: a dictionary shared by the points that stand on this site, for this call only.
    """

    module: nn.Module
    args: Args
    kwargs: Kwargs
    sources: tuple[tuple[nn.Module, Tensor], ...] = ()
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def input(self) -> Tensor:
        """The first argument of the module."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def without_graph(self) -> Call:
        """The same call, of tensors that hold no graph: for what is kept."""
        if not torch.is_grad_enabled():
            return self
        args = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.args])
        kwargs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in self.kwargs.items()}
        return Call(self.module, args, kwargs, self.sources, self.scratch)


def split(x: Tensor, n: int) -> Tensor:
    """``... (n d) -> ... n d``, a view. (`Tensor.unflatten` does the same through several layers of Python.)"""
    return x.view(*x.shape[:-1], n, x.shape[-1] // n)


class Deferred:
    """What a view would show, computed when it is asked for.

    Args:
        view: one that is `deferrable`.
        x: the tensor at its site.
        call: the call that it came from.
    """

    __slots__ = ("_seen", "call", "view", "x")

    def __init__(self, view: View, x: Tensor, call: Call) -> None:
        self.view, self.x, self.call = view, x, call
        self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """Of what it is computed from."""
        x = self.x
        if not self.view.contextual:
            return () if x.is_inference() else (x._version,)
        return tuple([tensor._version for tensor in (x, self.call.input) if not tensor.is_inference()])

    @property
    def keeps_more(self) -> bool:
        """Whether it keeps more in memory than the activation would take."""
        return self.view.contextual

    def _at_site(self) -> Tensor:
        """The tensor at its site."""
        return self.x

    def value(self, name: str) -> Tensor:
        """The activation.

        Args:
            name: of the hook point, for the error.

        Raises:
            RuntimeError: what it is computed from was changed in place since.
        """
        if self._versions() != self._seen:
            raise RuntimeError(f"{name} cannot be computed any more: what it is made from was changed in place")
        with torch.inference_mode(self.x.is_inference()), torch.no_grad():  # as in the run
            return self.view.get(self._at_site(), self.call)


class View:
    """The identity: the site's tensor is the activation."""

    #: True where `get` returns the site's own tensor.
    identity: bool = True
    #: True where `get` and `put` look at the call.
    contextual: bool = False
    #: True where `get` computes something from the site's tensor and the module's input alone: it can wait until asked.
    deferrable: bool = False
    #: True where an edit is copied into the site's tensor, so that everyone who holds that tensor sees it.
    writes_through: bool = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new

    def __repr__(self) -> str:
        return type(self).__name__


class Branch(View):
    """One of several readers of a tensor: its edit, and its gradient, are of that reader alone."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.view_as(x) if x.requires_grad else x


class WriteThrough(View):
    """The tensor that enters a norm is also the skip connection: an edit is made in place, and both see it."""

    writes_through = True

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if x.requires_grad and x.is_leaf:
            raise RuntimeError(
                "cannot edit a residual stream that is a leaf of the autograd graph in place; "
                "detach it or compute it from a parameter"
            )
        return x.copy_(new)


class Derived(View):
    """A view whose activation is computed, not a part of the site's tensor."""

    identity = False
    contextual = True


@dataclass(frozen=True, repr=False)
class Heads(View):
    """``... (head d_head) -> ... head d_head``."""

    n_heads: int
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return split(x, self.n_heads)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.flatten(-2)


@dataclass(frozen=True, repr=False)
class Part(View):
    """A part of a fused projection, chosen by a function that returns a view of its argument."""

    select: Callable[[Tensor], Tensor]
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.select(x)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        whole = x.clone()
        self.select(whole).copy_(new)
        return whole


def columns(start: int, stop: int, n_heads: int | None = None) -> Part:
    """Columns `start` to `stop` of the last axis, split into heads where `n_heads` is given."""

    def select(x: Tensor) -> Tensor:
        part = x[..., start:stop]
        return part if n_heads is None else split(part, n_heads)

    return Part(select)


def interleaved(n_heads: int, index: int, parts: int = 3) -> Part:
    """Part `index` of a projection laid out as ``(head part d_head)`` (GPT-NeoX, BLOOM)."""
    return Part(lambda x: x.unflatten(-1, (n_heads, parts, -1)).select(-2, index))


class HeadsFirst(View):
    """``batch head pos d_head -> batch pos head d_head`` (inside the attention interface)."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(1, 2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(1, 2)


class MaskedScores(View):
    """Attention scores before the softmax; the model's large negative filler is shown as ``-inf``.

    Written back, ``-inf`` means what it says (no attention). Rows in which the model itself allows nothing (padding)
    keep the model's filler, so that reading and writing back changes nothing.
    """

    identity = False
    deferrable = True

    @staticmethod
    def masked(x: Tensor) -> Tensor:
        return x < torch.finfo(x.dtype).min / 2

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.masked_fill(self.masked(x), float("-inf"))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        nothing_allowed = self.masked(x).all(-1, keepdim=True)
        return torch.where(nothing_allowed & new.isneginf(), x, new)


class AlibiScores(MaskedScores):
    """Scores to which the model added ``slope * key position``, shown with ``slope * (key position - query position)``.

    The two differ by a constant for each query, which the softmax does not see; a value that is read and written back
    differs by rounding. The module is given ``alibi``, ``[(batch head), 1, key_pos]``.
    """

    deferrable = False

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

    def taken(self, x: Tensor, call: Call) -> Tensor:
        """What the model took from each row, ``[batch, head, query, 1]``."""
        return getattr(call.module, self.sinks).view(-1, 1, 1) - x[..., -1:]

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x[..., :-1], call) + self.taken(x, call)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        scores = self.inner.put(x[..., :-1], new - self.taken(x, call), call)
        return torch.cat([scores, x[..., -1:]], dim=-1)


@dataclass(frozen=True, repr=False)
class Scaled(View):
    """What a module returns, times the constant factor that the block multiplies it with before it is added."""

    factor: float
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x * self.factor

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new / self.factor


class WithBatchAxis(Derived):
    """A tensor with one row for all of the batch (position embeddings), shown with the batch axis of its source."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        batch = call.sources[0][1].shape[0]
        rows = x if x.ndim == 3 else x.unsqueeze(0)
        return rows.expand(batch, -1, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new


class FlatRows(View):
    """``(batch pos) d -> batch pos d``, with the batch size of the last source (a module that works on rows)."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x if x.ndim == 3 else x.unflatten(0, (call.sources[-1][1].shape[0], -1))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim == 3 else new.flatten(0, 1)


class Composed(View):
    """What `inner` sees at the site, seen through `outer`.

    Args:
        inner: the view of the site's tensor.
        outer: the view of what `inner` shows.
    """

    identity = False

    def __init__(self, inner: View, outer: View) -> None:
        self.inner, self.outer = inner, outer
        self.writes_through = inner.writes_through
        self.contextual = inner.contextual or outer.contextual

    def get(self, x: Tensor, call: Call) -> Tensor:
        act = self.outer.get(self.inner.get(x, call), call)
        # What is written through takes the site's place in the graph: it must not be a view of what it replaces.
        return act.clone() if self.writes_through and act.requires_grad else act

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, self.outer.put(self.inner.get(x, call), new, call), call)
