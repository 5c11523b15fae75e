"""Tensors of the stream's shape: scaled, copied, without a batch axis, in rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

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


@dataclass(frozen=True)
class Affine:
    """``(x + bias) * weight * factor + plus``: what a block does to a tensor before it adds it to another.

    Attributes:
        factor: a constant.
        weight, bias, plus: parameters of the block, by their paths in it: ``[d_model]``, or one number.
        squashed: it is the weight's `tanh` that is multiplied with (a gate).
    """

    factor: float = 1.0
    weight: str | None = None
    bias: str | None = None
    squashed: bool = False
    plus: str | None = None

    def of(self, x: Tensor, block: nn.Module) -> Tensor:
        """What it makes of a tensor ``[..., d_model]``."""
        bias = self._bias(block)
        y = self.linear(x if bias is None else x + bias, block)
        return y if self.plus is None else y + block.get_parameter(self.plus)

    def linear(self, x: Tensor, block: nn.Module) -> Tensor:
        """The same without its bias: what it makes of one of several terms of a sum, or of a matrix that writes it."""
        weight = self._weight(block)
        return x * (self.factor if weight is None else weight)

    def undone(self, y: Tensor, block: nn.Module) -> Tensor:
        """The tensor that it makes this one of.

        Raises:
            ValueError: its weight has zeros: no tensor would become this one.
        """
        bias, weight = self._bias(block), self._weight(block)
        if weight is not None and not (torch.compiler.is_compiling() or weight.is_meta or is_fake(weight)):
            zeros = int((weight == 0).sum())
            if zeros:
                raise ValueError(
                    f"{self.weight} of {type(block).__name__}, which the model multiplies with, has {zeros} zeros of "
                    f"{weight.numel()}: what is added to the stream cannot be changed behind it, nor has it a gradient "
                    "there. Use what the part puts out before it, its own hook_out"
                )
        y = y if self.plus is None else y - block.get_parameter(self.plus)
        x = y / (self.factor if weight is None else weight)
        return x if bias is None else x - bias

    def parameters(self) -> tuple[str, ...]:
        """The paths of its parameters."""
        return tuple(path for path in (self.weight, self.bias, self.plus) if path)

    def _bias(self, block: nn.Module) -> Tensor | None:
        return None if self.bias is None else block.get_parameter(self.bias)

    def _weight(self, block: nn.Module) -> Tensor | None:
        if self.weight is None:
            return None
        weight = block.get_parameter(self.weight)
        return (torch.tanh(weight) if self.squashed else weight) * self.factor


@dataclass(frozen=True, repr=False)
class Adjusted(View):
    """What a module returns, after the block has scaled and shifted it; the block is the module of the last source."""

    by: Affine
    identity = False
    contextual = True

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.by.of(x, call.sources[-1][0])

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.by.undone(new, call.sources[-1][0])


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


class PositionsFirst(View):
    """``pos batch ... -> batch pos ...`` (XLNet)."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(0, 1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new.transpose(0, 1)


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
