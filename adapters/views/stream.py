"""Tensors of the stream's shape: scaled, copied, without a batch axis, in rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from adapters.views.base import Call, Derived, View, split


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
    """``x * weight * factor + plus``: a link of a chain that a tensor goes through, in constants and parameters.

    Attributes:
        factor: a constant.
        weight, plus: parameters of the block, by their paths in it: ``[d_model]``, or one number. `plus` may be a table
            with a row for each place, or a buffer.
        squashed: it is the weight's `tanh` that is multiplied with (a gate).
    """

    factor: float = 1.0
    weight: str | None = None
    squashed: bool = False
    plus: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The paths of its parameters."""
        return tuple(path for path in (self.weight, self.plus) if path)

    def linear(self, x: Tensor, block: nn.Module) -> Tensor:
        """What it makes of a tensor ``[..., d_model]``, without `plus`."""
        weight = self._weight(block)
        return x * (self.factor if weight is None else weight)

    def of(self, x: Tensor, block: nn.Module) -> Tensor:
        """What it makes of a tensor ``[..., d_model]``."""
        y = self.linear(x, block)
        return y if self.plus is None else y + self._plus(block, y)

    def undone(self, y: Tensor, block: nn.Module) -> Tensor:
        """The tensor that it makes this one of.

        Raises:
            ValueError: its weight has zeros: no tensor would become this one.
        """
        weight = self._weight(block)
        if weight is not None and not (torch.compiler.is_compiling() or weight.is_meta or is_fake(weight)):
            zeros = int((weight == 0).sum())
            if zeros:
                raise ValueError(
                    f"{self.weight} of {type(block).__name__}, which the model multiplies with, has {zeros} zeros of "
                    f"{weight.numel()}: what is added to the stream cannot be changed behind it, nor has it a gradient "
                    "there. Use what the part puts out before it, its own hook_out"
                )
        y = y if self.plus is None else y - self._plus(block, y)
        return y / (self.factor if weight is None else weight)

    def _plus(self, block: nn.Module, like: Tensor) -> Tensor:
        """What is added to a tensor ``[..., d_model]``, or ``[batch, pos, d_model]``."""
        holder, _, name = (self.plus or "").rpartition(".")
        held: Tensor = getattr(block.get_submodule(holder), name)
        return held if held.ndim < 2 else held.reshape(-1, held.shape[-1])[: like.shape[-2]]

    def _weight(self, block: nn.Module) -> Tensor | None:
        if self.weight is None:
            return None
        weight = block.get_parameter(self.weight)
        return (torch.tanh(weight) if self.squashed else weight) * self.factor


#: What a tensor goes through, link by link.
Chain = tuple[Affine, ...]


def times(factor: float) -> Chain:
    """The chain that multiplies with a constant; without a link where that is one."""
    return () if factor == 1 else (Affine(factor),)


def parameters_of(chain: Chain) -> tuple[str, ...]:
    """The paths of all its parameters."""
    return tuple(path for link in chain for path in link.parameters)


def constant_of(chain: Chain) -> float | None:
    """What a chain multiplies with, whatever it adds; None where parameters multiply, too."""
    return None if any(link.weight for link in chain) else math.prod(link.factor for link in chain)


def transformed(chain: Chain, x: Tensor, block: nn.Module) -> Tensor:
    """What a chain makes of a tensor.

    Args:
        chain: the links.
        x: ``[..., d_model]``.
        block: the module whose parameters they name.
    """
    for link in chain:
        x = link.of(x, block)
    return x


def linearly(chain: Chain, x: Tensor, block: nn.Module) -> Tensor:
    """The same without what it adds: what it makes of a term of a sum, or of a matrix that writes it."""
    for link in chain:
        x = link.linear(x, block)
    return x


@dataclass(frozen=True, repr=False)
class Adjusted(View):
    """What a module returns, behind a chain of the block's; the block is the module of the last source."""

    by: Chain
    identity = False
    contextual = True

    def get(self, x: Tensor, call: Call) -> Tensor:
        return transformed(self.by, x, call.sources[-1][0])

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        for link in reversed(self.by):
            new = link.undone(new, call.sources[-1][0])
        return new


def through(chain: Chain) -> View | None:
    """What a module returns, behind a chain; None where that is the same."""
    if not chain:
        return None
    factor = None if parameters_of(chain) else constant_of(chain)
    return Adjusted(chain) if factor is None else None if factor == 1 else Scaled(factor)


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


@dataclass(frozen=True, repr=False)
class SeveralStreams(View):
    """``batch pos (stream d_model) -> batch pos stream d_model``; streams that have an axis stay as they are."""

    n_streams: int
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x if x.ndim == 4 else split(x, self.n_streams)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim == 4 else new.flatten(-2)


@dataclass(frozen=True, repr=False)
class PositionsFirst(View):
    """``pos batch ... -> batch pos ...`` (XLNet).

    Attributes:
        embeddings: of a stack, whether the embeddings before its blocks are given positions first, too.
        end: likewise the norm behind them and the output layer (ChatGLM 2, whose embeddings are not).
    """

    embeddings: bool = True
    end: bool = False
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(0, 1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        turned = new.transpose(0, 1)
        return turned.contiguous() if x.is_contiguous() else turned  # the model may take a view of it (FSMT)


class FlatRows(View):
    """``(batch pos) d -> batch pos d``, with the batch size of the last source (a module that works on rows)."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x if x.ndim == 3 else x.unflatten(0, (call.sources[-1][1].shape[0], -1))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim == 3 else new.flatten(0, 1)


class Rows(View):
    """``... row d -> row d``: what an expert is given may have axes of one (Hunyuan)."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x if x.ndim == 2 else x.flatten(0, -2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim == 2 else new.view(*x.shape[:-1], new.shape[-1])


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
        self.parameters = (*inner.parameters, *outer.parameters)

    def get(self, x: Tensor, call: Call) -> Tensor:
        act = self.outer.get(self.inner.get(x, call), call)
        # What is written through takes the site's place in the graph: it must not be a view of what it replaces.
        return act.clone() if self.writes_through and act.requires_grad else act

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, self.outer.put(self.inner.get(x, call), new, call), call)
