"""Tensors of the stream's shape: scaled, copied, without a batch axis, in rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from adapters.views.base import Call, Derived, View


@dataclass(frozen=True, repr=False)
class Scaled(View):
    """What a module returns, times the constant factor that the block multiplies it with before it is added."""

    factor: float
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x * self.factor

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new / self.factor


@dataclass(frozen=True, repr=False)
class WithParameter(View):
    """What a module returns, and a parameter of its own that is added behind it, ``[d_model]``."""

    name: str
    identity = False
    contextual = True

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x + call.module.get_parameter(self.name)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new - call.module.get_parameter(self.name)


class Copied(View):
    """Of a tensor that the model writes over afterwards, a copy of what `inner` sees."""

    identity = False
    at_once = True

    def __init__(self, inner: View) -> None:
        self.inner = inner
        self.writes_through, self.contextual = inner.writes_through, inner.contextual

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x, call).clone()

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, new, call)


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
