"""What a view is, and the simplest ones: how the tensor at a site is seen as a hook point's activation.

A hook point stands where torch lets us stand (`adapters.points.Site`), and the tensor there rarely has the shape that
the point promises: heads lie in columns, tokens in rows, queries, keys and values in one fused output. A `View` is the
pair of functions between the two.

**In**: the tensor at the site, and the `Call` of the module in progress (its arguments, and what was seen at other
sites that the point named as sources).

**Out**: ``get(x, call)`` is the activation; ``put(x, new, call)`` is the tensor that takes the place of ``x`` when the
activation is to be ``new``.

**What holds of every view**:

1. ``put(x, get(x))`` is ``x``. `verify` tries it at every hook point.
2. `get` and `put` are of one place: they do not run the model.
3. A view says of itself what who uses it has to know: whether `get` returns the site's own tensor (`identity`), looks
   at the call (`contextual`), may be asked after the run (`deferrable`, `at_once`), sees rows one by one (`by_row`), or
   is written through in place, so that the skip connection sees it, too (`writes_through`).
4. Views compose: `Composed(inner, outer)` is what `outer` sees of what `inner` sees. A basis of the user's is one more
   view on top (`adapters.views.basis`).

Beside views stands `Affine`, a link of a chain ``x * weight * factor + plus`` that a tensor goes through in a block: a
constant or a parameter that a declaration names. It computes itself forward (`of`), for a term of a sum (`linear`), and
backward (`undone`).

**It refuses** an edit that cannot be undone: behind a weight with zeros, or in place of a leaf of the autograd graph.

**It does not know** who listens, where a tensor is cut over processes (`adapters.spread`), or which model it is of.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

# ----------------------------------------------------------------------------------------------------------------------
# What a module is called with: the names of its arguments, and which of them is the first tensor.
# ----------------------------------------------------------------------------------------------------------------------


@functools.cache
def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a forward function takes, in order, without the module itself."""
    return tuple(inspect.signature(forward).parameters)[1:]


def place_of_input(module: nn.Module, args: Args, kwargs: Kwargs) -> int | str | None:
    """Where the first tensor stands that a module is called with: its place among `args`, or its name among `kwargs`.

    None where there is none.

    Args:
        module: which is called.
        args, kwargs: with these.
    """
    if args and isinstance(args[0], Tensor):
        return 0
    place = next((place for place, x in enumerate(args) if isinstance(x, Tensor)), None)
    if place is not None:
        return place
    names = (*names_of(type(module).forward), *kwargs)
    return next((name for name in names if isinstance(kwargs.get(name), Tensor)), None)


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
        private: the tensor at the site was made for the one hook point there: nobody else holds it.
    """

    module: nn.Module
    args: Args
    kwargs: Kwargs
    sources: tuple[tuple[nn.Module, Tensor], ...] = ()
    scratch: dict[str, Any] = field(default_factory=dict)
    private: bool = False

    @property
    def input(self) -> Tensor:
        """The first tensor that the module is given."""
        if self.args and isinstance(self.args[0], Tensor):
            return self.args[0]
        place = place_of_input(self.module, self.args, self.kwargs)
        found: Tensor = self.args[place] if isinstance(place, int) else self.kwargs[place or ""]
        return found

    @property
    def told(self) -> Kwargs:
        """What the module is called with by name beside its input, such as the adapter of each row (PEFT)."""
        return {name: value for name, value in self.kwargs.items() if value is not self.input}

    def without_graph(self) -> Call:
        """The same call, for what is kept: its tensors without a graph, and not the keys and values of a past."""
        args = tuple([x.detach() for x in self.args if isinstance(x, Tensor)])
        kwargs = {
            name: x.detach() if isinstance(x, Tensor) else x  # a list: of each row (PEFT)
            for name, x in self.kwargs.items()
            if isinstance(x, Tensor | list)
        }
        return Call(self.module, args, kwargs, self.sources, self.scratch)


#: For views that do not look at the call.
NO_CALL = Call(nn.Identity(), (), {})


def split(x: Tensor, n: int) -> Tensor:
    """``... (n d) -> ... n d``, a view. (`Tensor.unflatten` does the same through several layers of Python.)"""
    return x.view(*x.shape[:-1], n, x.shape[-1] // n)


class Deferred:
    """What a view would show, computed when it is asked for.

    Args:
        view: one that is `deferrable`.
        x: the tensor at its site.
        call: the call that it came from.
        waits: whether it may be computed later than now.
    """

    __slots__ = ("_seen", "call", "view", "waits", "x")

    def __init__(self, view: View, x: Tensor, call: Call, waits: bool = True) -> None:
        self.view, self.x, self.call, self.waits = view, x, call, waits
        self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """Of what it is computed from."""
        x = self.x
        own = -1 if x.is_inference() else x._version
        if not self.view.contextual:
            return (own,)
        given = self.call.input
        return own, -1 if given.is_inference() else given._version

    @property
    def keeps_more(self) -> bool:
        """Whether it keeps more in memory than the activation would take."""
        return self.view.contextual

    @property
    def n_rows(self) -> int:
        """How many rows it has, where its view sees each by itself."""
        return self.x.shape[-2]

    def _at_site(self, rows: slice | Tensor | None) -> Tensor:
        """The tensor at its site, or some of its rows."""
        return self.x if rows is None else self.x[..., rows, :]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it is computed from, row by row."""
        return tuple(self.x.shape)

    def of_heads(self, heads: Tensor) -> Deferred | None:
        """The same of some heads of scores or a pattern; None: they cannot be computed alone.

        Args:
            heads: which, in ascending order, on the CPU.
        """
        return None

    def part(self, name: str, heads: Any, queries: Any) -> Tensor | None:
        """Some heads and queries of scores or a pattern, all axes there; None: it cannot be computed in parts.

        Args:
            name: of the hook point, for the error.
            heads, queries: what these axes are indexed with; None: all.
        """
        return None

    def check(self, name: str) -> None:
        """Refuses to compute it from other numbers.

        Args:
            name: of the hook point, for the error.

        Raises:
            RuntimeError: what it is computed from was changed in place since.
        """
        if self._versions() != self._seen:
            raise RuntimeError(f"{name} cannot be computed any more: what it is made from was changed in place")

    def value(self, name: str, rows: slice | Tensor | None = None) -> Tensor:
        """The activation.

        Args:
            name: of the hook point, for the error.
            rows: which of its rows, where its view sees each by itself; None: all.

        Raises:
            RuntimeError: what it is computed from was changed in place since.
        """
        self.check(name)
        with torch.inference_mode(self.x.is_inference()), torch.no_grad():  # as in the run
            return self.view.get(self._at_site(rows), self.call)


class View:
    """The identity: the site's tensor is the activation."""

    #: True where `get` returns the site's own tensor: of a view that has no `get` and no `put` of its own, or says so.
    identity: bool = True
    #: True where `get` and `put` look at the call.
    contextual: bool = False
    #: True where `get` computes something from the site's tensor and the module's input alone: it can wait until asked.
    deferrable: bool = False
    #: True where the model writes over the site's tensor afterwards: `get` cannot wait.
    at_once: bool = False
    #: True where `get` computes each row ``[..., row, :]`` from the same row of the site's tensor alone.
    by_row: bool = False
    #: The parameters of the module, an entry for each head, that `get` and `put` look for in ``call.scratch``, and then
    #: in the module: where processes share the heads, the module has those of some heads.
    parameters: tuple[str, ...] = ()
    #: True where an edit is copied into the site's tensor, so that everyone who holds that tensor sees it.
    writes_through: bool = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        above = next(each for each in cls.__mro__[1:] if issubclass(each, View))
        if "identity" not in vars(cls) and not (cls.get is above.get and cls.put is above.put):
            cls.identity = False

    @property
    def can_wait(self) -> bool:
        """Whether `get` may be asked after the run: it needs no more of the call than the module's input."""
        return (self.deferrable or not self.contextual) and not self.at_once

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new

    def __repr__(self) -> str:
        return type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Branch(View):
    """One of several readers of a tensor: its edit, and its gradient, are of that reader alone."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.view_as(x) if x.requires_grad else x


class WriteThrough(View):
    """The tensor that enters a norm is also the skip connection: an edit is made in place, and both see it."""

    identity = writes_through = True

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if x.requires_grad and x.is_leaf:
            raise RuntimeError(
                "cannot edit a residual stream that is a leaf of the autograd graph in place; "
                "detach it or compute it from a parameter"
            )
        return x.copy_(new)


class Derived(View):
    """A view whose activation is computed, not a part of the site's tensor."""

    contextual = True


# ----------------------------------------------------------------------------------------------------------------------
# Tensors of the stream's shape: scaled, copied, without a batch axis, in rows.
# ----------------------------------------------------------------------------------------------------------------------


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
        if weight is not None and not (torch.compiler.is_dynamo_compiling() or weight.is_meta or is_fake(weight)):
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
    """What a module returns, behind a chain, before it is added.

    The chain's parameters are the block's, which is the module of the last source; constants alone need no source.
    """

    by: Chain

    @functools.cached_property
    def contextual(self) -> bool:  # type: ignore[override]
        return bool(parameters_of(self.by))

    def get(self, x: Tensor, call: Call) -> Tensor:
        return transformed(self.by, x, call.sources[-1][0] if self.contextual else call.module)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        block = call.sources[-1][0] if self.contextual else call.module
        for link in reversed(self.by):
            new = link.undone(new, block)
        return new


def through(chain: Chain) -> View | None:
    """What a module returns, behind a chain; None where that is the same."""
    factor = None if parameters_of(chain) else constant_of(chain)
    chain = chain if factor is None else times(factor)
    return Adjusted(chain) if chain else None


class Copied(View):
    """Of a tensor that the model writes over afterwards, a copy of what `inner` sees; of what is put, a copy, too."""

    at_once = True

    def __init__(self, inner: View) -> None:
        self.inner = inner
        self.writes_through, self.contextual = inner.writes_through, inner.contextual

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x, call).clone()

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, new.clone(), call)


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
    """``batch pos (stream d_model) -> batch pos stream d_model``; streams that have an axis stay as they are.

    Attributes:
        n_streams: how many.
        first: their axis is the first (AltUp). The first stream begins with the embeddings. How the others are made of
            it, and one of them all behind the blocks, is not declared.
    """

    n_streams: int
    first: bool = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        if self.first:
            return x.movedim(0, 2)
        return x if x.ndim == 4 else split(x, self.n_streams)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if self.first:
            return new.movedim(2, 0)
        return new if x.ndim == 4 else new.flatten(-2)


@dataclass(frozen=True, repr=False)
class StreamWeights(View):
    """Weights of streams, with the one that the model adds (AltUp): of what each becomes, and of what each gets.

    ``... (to_stream stream) -> ... stream to_stream``, or ``... stream -> ... stream``.
    """

    n_streams: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        if x.shape[-1] == self.n_streams:
            return x + 1
        return split(x, self.n_streams).mT + torch.eye(self.n_streams, dtype=x.dtype, device=x.device)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if x.shape[-1] == self.n_streams:
            return new - 1
        return (new - torch.eye(self.n_streams, dtype=x.dtype, device=x.device)).mT.flatten(-2)


@dataclass(frozen=True, repr=False)
class PositionsFirst(View):
    """``pos batch ... -> batch pos ...`` (XLNet).

    Attributes:
        embeddings: of a stack, whether the embeddings before its blocks are given positions first, too.
        end: likewise the norm behind them and the output layer (ChatGLM 2, whose embeddings are not).
    """

    embeddings: bool = True
    end: bool = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(0, 1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        turned = new.transpose(0, 1)
        return turned.contiguous() if x.is_contiguous() else turned  # the model may take a view of it (FSMT)


@dataclass(frozen=True, repr=False)
class FlatRows(View):
    """``(batch pos) d -> batch pos d``, with the batch size of the last source (a module that works on rows).

    Attributes:
        heads: ``(batch pos head) d -> batch pos head d``, with the number of positions of that source, too.
    """

    heads: bool = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x if x.ndim > 2 else x.unflatten(0, (*call.sources[-1][1].shape[: 1 + self.heads], -1))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim > 2 else new.flatten(0, 1 + self.heads)


class ExpertRows(View):
    """``... row d -> row d``: what an expert is given may have axes of one (Hunyuan)."""

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
