"""Views: conversions between the tensor at a site and a hook point's activation.

A hook point stands where torch can hook (`adapters.points.Site`), and the tensor there rarely has
the shape that the point promises: heads lie in columns, tokens in rows, queries, keys and values in
one fused output. A `View` is the pair of functions between the two.

**In**: the tensor at the site, and the `Call` of the module in progress (its arguments, and the
tensors at the point's source sites).

**Out**: ``get(x, call)`` is the activation; ``put(x, new, call)`` is the tensor that replaces ``x``
when the activation is set to ``new``.

**Properties of every view**:

1. ``put(x, get(x))`` is ``x``. `verify` tests it at every hook point.
2. `get` and `put` are local: they do not run the model.
3. A view declares whether `get` returns the site's own tensor (`identity`), reads the call
   (`contextual`), may run after the pass (`deferrable`, `at_once`), processes rows independently
   (`by_row`), or is written through in place, so that the skip connection sees it, too
   (`writes_through`).
4. Views compose: `Composed(inner, outer)` applies `outer` to what `inner` shows. A user's basis is
   one more view on top (`adapters.views.basis`).

`Affine` is a link of a chain ``x * weight * factor + plus`` that a tensor goes through in a block:
a constant or a parameter that a declaration names. It is computed forward (`of`), for a term of a
sum (`linear`), and backward (`undone`).

**Errors**: an edit that cannot be inverted raises an error: after a weight with zeros, or in place
of a leaf of the autograd graph.

**Independent of** listeners, of the sharding of tensors over processes (`adapters.spread`), and of
the model.
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

from adapters.views.values import Fingerprint, fingerprint, is_readable

# --------------------------------------------------------------------------------------------------
# The call of a module: the names of its arguments, and which of them is the first tensor.
# --------------------------------------------------------------------------------------------------


@functools.cache
def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a forward function's arguments, in order, without the module itself."""
    return tuple(inspect.signature(forward).parameters)[1:]


def place_of_input(module: nn.Module, args: Args, kwargs: Kwargs) -> int | str | None:
    """Return where the first tensor is passed in a module's call: its index in `args`, or its name
    in `kwargs`; None if there is none.

    Args:
        module: the module that is called.
        args, kwargs: the arguments of the call.
    """
    if args and isinstance(args[0], Tensor):
        return 0
    for place, x in enumerate(args):
        if isinstance(x, Tensor):
            return place
    for name in (*names_of(type(module).forward), *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return name
    return None


#: The positional arguments of a module's call.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(slots=True)
class Call:
    """The current call of a hooked module, as views see it.

    Attributes:
        module: the module being called.
        args, kwargs: the arguments of the call.
        sources: for each of the point's source sites, the module that was called there and its
            tensor.
        scratch: a dictionary shared by the points on this site, for this call only.
        private: whether the tensor at the site was made for its only hook point and has no other
            reference.
    """

    module: nn.Module
    args: Args
    kwargs: Kwargs
    sources: tuple[tuple[nn.Module, Tensor], ...] = ()
    scratch: dict[str, Any] = field(default_factory=dict)
    private: bool = False

    @property
    def input(self) -> Tensor:
        """Return the first tensor passed to the module."""
        if self.args and isinstance(self.args[0], Tensor):
            return self.args[0]
        place = place_of_input(self.module, self.args, self.kwargs)
        x: Tensor = self.args[place] if isinstance(place, int) else self.kwargs[place or ""]
        return x

    @property
    def told(self) -> Kwargs:
        """Return the keyword arguments of the call besides its input, such as each row's adapter
        (PEFT).
        """
        return {name: value for name, value in self.kwargs.items() if value is not self.input}

    def without_graph(self) -> Call:
        """Return a copy of the call that can be kept: with tensors detached, and without a cache of
        keys and values.
        """
        args = tuple([x.detach() for x in self.args if isinstance(x, Tensor)])
        kwargs: Kwargs = {}
        for name, x in self.kwargs.items():
            if isinstance(x, Tensor):
                kwargs[name] = x.detach()
            elif isinstance(x, list):  # one entry per row (PEFT)
                kwargs[name] = x
        return Call(self.module, args, kwargs, self.sources, self.scratch)


#: For views that do not read the call.
NO_CALL = Call(nn.Identity(), (), {})


def split(x: Tensor, n: int) -> Tensor:
    """Reshape ``... (n d) -> ... n d``, as a view. (`Tensor.unflatten` does the same through
    several layers of Python.)
    """
    return x.view(*x.shape[:-1], n, x.shape[-1] // n)


class Deferred:
    """An activation that is computed when it is first read.

    Args:
        view: a `deferrable` view.
        x: the tensor at its site.
        call: the module call that it came from.
        waits: whether it may still be computed after the listener has returned.
    """

    __slots__ = ("_noted", "_seen", "call", "view", "waits", "x")

    def __init__(self, view: View, x: Tensor, call: Call, waits: bool = True) -> None:
        self.view = view
        self.x = x
        self.call = call
        self.waits = waits
        self._seen = self._state()
        self._noted: list[Fingerprint] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that it is computed from."""
        return (self.x, self.call.input) if self.view.contextual else (self.x,)

    def _state(self) -> tuple[object, ...]:
        """Return the versions of these tensors, and the module's constants that the computation
        needs."""
        versions = [-1 if x.is_inference() else x._version for x in self.tensors()]
        return (*versions, *self.view.constants(self.call))

    def note_values(self) -> None:
        """Record the tensors' values, before other code may write to them without changing their
        version counter."""
        if self._noted is None and all(map(is_readable, self.tensors())):
            self._noted = [fingerprint(x, whole=True) for x in self.tensors()]

    @property
    def keeps_more(self) -> bool:
        """Tell whether it keeps more memory alive than the activation would take."""
        return self.view.contextual

    @property
    def n_rows(self) -> int:
        """Return the number of rows, if the view is computed row by row."""
        return self.x.shape[-2]

    def _at_site(self, rows: slice | Tensor | None) -> Tensor:
        """Return the tensor at the site, or some of its rows."""
        return self.x if rows is None else self.x[..., rows, :]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensors it is computed from, without their row axis."""
        return tuple(self.x.shape)

    def of_heads(self, heads: Tensor) -> Deferred | None:
        """Return the deferred scores or pattern of some heads; None if heads cannot be computed
        separately.

        Args:
            heads: the indices of the heads, in ascending order, on the CPU.
        """
        return None

    def part(self, name: str, heads: Any, queries: Any) -> Tensor | None:
        """Compute some heads and queries of scores or a pattern, with all axes kept; None where
        they cannot be computed in parts.

        Args:
            name: the name of the hook point, for the error.
            heads, queries: the indices of these axes; None: all.
        """
        return None

    def check(self, name: str) -> None:
        """Raise an error if the tensors that it is computed from have changed.

        Args:
            name: the name of the hook point, for the error.

        Raises:
            RuntimeError: one of these tensors, or the module, was changed since.
        """
        unchanged = self._state() == self._seen
        if unchanged and self._noted is not None:
            unchanged = self._noted == [fingerprint(x, whole=True) for x in self.tensors()]
        if not unchanged:
            raise RuntimeError(
                f"{name} cannot be computed any more: what it is made from was changed in place"
            )

    def value(self, name: str, rows: slice | Tensor | None = None) -> Tensor:
        """Compute the activation.

        Args:
            name: the name of the hook point, for the error.
            rows: the indices of rows, where the view is computed row by row; None: all.

        Raises:
            RuntimeError: a tensor that it is computed from was changed in place since.
        """
        self.check(name)
        with torch.inference_mode(self.x.is_inference()), torch.no_grad():  # as in the run
            return self.view.get(self._at_site(rows), self.call)


class View:
    """The identity view: the site's tensor is the activation."""

    #: True where `get` returns the site's own tensor: the view has no `get` and no `put` of its
    #: own, or declares it.
    identity: bool = True
    #: True where `get` and `put` read the call.
    contextual: bool = False
    #: True where `get` needs only the site's tensor and the module's input, so that it can be
    #: computed after the run.
    deferrable: bool = False
    #: True where the model later overwrites the site's tensor: `get` must run immediately.
    at_once: bool = False
    #: True where `get` computes each row ``[..., row, :]`` from the same row of the site's tensor
    #: alone.
    by_row: bool = False
    #: The parameters of the module, an entry for each head, that `get` and `put` look up in
    #: ``call.scratch``, and then in the module. Where processes share the heads, the module has
    #: only some of the entries.
    parameters: tuple[str, ...] = ()
    #: True where an edit is copied into the site's tensor, so that every holder of that tensor sees
    #: it.
    writes_through: bool = False

    def constants(self, call: Call) -> tuple[object, ...]:
        """Return the constants of the module, such as an epsilon, that a deferred `get` needs
        besides the tensors."""
        return ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        base = next(other for other in cls.__mro__[1:] if issubclass(other, View))
        if "identity" not in vars(cls) and (cls.get, cls.put) != (base.get, base.put):
            cls.identity = False

    @property
    def can_wait(self) -> bool:
        """Tell whether `get` may be called after the run, because it needs only the module's
        input."""
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
    """A view for one of several readers of a tensor: edits and gradients concern only that
    reader."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.view_as(x) if x.requires_grad else x


class WriteThrough(View):
    """A view of a norm's input that is also the skip connection: edits are made in place, so that
    both see them.
    """

    identity = writes_through = True

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if x.requires_grad and x.is_leaf:
            raise RuntimeError(
                "cannot edit a residual stream that is a leaf of the autograd graph in place; "
                "detach it or compute it from a parameter"
            )
        return x.copy_(new)


class Derived(View):
    """A view whose activation is computed from the site's tensor and not a slice of it."""

    contextual = True


# --------------------------------------------------------------------------------------------------
# Tensors of the stream's shape: scaled, copied, without a batch axis, in rows.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Affine:
    """A link in a chain of transforms, made of constants and parameters: ``x * weight * factor +
    plus``.

    Attributes:
        factor: a constant.
        weight, plus: parameters of the block, by their paths in it: ``[d_model]``, or one number.
            `plus` may be a table with a row for each position, or a buffer.
        squashed: whether the factor is the weight's `tanh` (a gate).
    """

    factor: float = 1.0
    weight: str | None = None
    squashed: bool = False
    plus: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the paths of its parameters."""
        return tuple(path for path in (self.weight, self.plus) if path)

    def linear(self, x: Tensor, block: nn.Module) -> Tensor:
        """Apply the scaling to a tensor ``[..., d_model]``, without `plus`."""
        return x * self._weight(block)

    def of(self, x: Tensor, block: nn.Module) -> Tensor:
        """Apply the affine map to a tensor ``[..., d_model]``."""
        y = self.linear(x, block)
        return y if self.plus is None else y + self._plus(block, y)

    def undone(self, y: Tensor, block: nn.Module) -> Tensor:
        """Invert the affine map.

        Raises:
            ValueError: its weight has zeros, so that it has no inverse.
        """
        weight = self._weight(block)
        if isinstance(weight, Tensor) and not (
            torch.compiler.is_dynamo_compiling() or weight.is_meta or is_fake(weight)
        ):
            zeros = int((weight == 0).sum())
            if zeros:
                raise ValueError(
                    f"{self.weight} of {type(block).__name__}, which the model multiplies with, has"
                    f" {zeros} zeros of {weight.numel()}: what is added to the stream cannot be"
                    " changed behind it, nor has it a gradient there. Use what the part puts out"
                    " before it, its own hook_out"
                )
        return (y if self.plus is None else y - self._plus(block, y)) / weight

    def _plus(self, block: nn.Module, like: Tensor) -> Tensor:
        """Return the term added to a tensor ``[..., d_model]``, or ``[batch, pos, d_model]``."""
        owner, _, name = (self.plus or "").rpartition(".")
        term: Tensor = getattr(block.get_submodule(owner), name)
        if term.ndim < 2:
            return term
        rows = term.reshape(-1, term.shape[-1])
        return rows[: like.shape[-2]]

    def _weight(self, block: nn.Module) -> Tensor | float:
        """Return the factor, including the parameter."""
        if self.weight is None:
            return self.factor
        weight = block.get_parameter(self.weight)
        return (torch.tanh(weight) if self.squashed else weight) * self.factor


#: The affine maps that a tensor goes through, in order.
Chain = tuple[Affine, ...]


def times(factor: float) -> Chain:
    """Return the chain that multiplies by a constant; it is empty if the constant is one."""
    return () if factor == 1 else (Affine(factor),)


def parameters_of(chain: Chain) -> tuple[str, ...]:
    """Return the paths of all parameters of a chain."""
    return tuple(path for link in chain for path in link.parameters)


def constant_of(chain: Chain) -> float | None:
    """Return a chain's constant factor, whatever it adds; None if it also multiplies by
    parameters."""
    return None if any(link.weight for link in chain) else math.prod(link.factor for link in chain)


def transformed(chain: Chain, x: Tensor, block: nn.Module) -> Tensor:
    """Apply a chain to a tensor.

    Args:
        chain: the links.
        x: ``[..., d_model]``.
        block: the module whose parameters they name.
    """
    for link in chain:
        x = link.of(x, block)
    return x


def linearly(chain: Chain, x: Tensor, block: nn.Module) -> Tensor:
    """Apply a chain without its additions, as needed for a term of a sum, or for a matrix that
    writes one."""
    for link in chain:
        x = link.linear(x, block)
    return x


@dataclass(frozen=True, repr=False)
class Adjusted(View):
    """A module's output, transformed by a chain before it is added.

    The chain's parameters belong to the block, which is the module of the last source; a chain of
    constants needs no source.
    """

    by: Chain

    @functools.cached_property
    def contextual(self) -> bool:  # type: ignore[override]
        return bool(parameters_of(self.by))

    def get(self, x: Tensor, call: Call) -> Tensor:
        return transformed(self.by, x, self._block(call))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        for link in reversed(self.by):
            new = link.undone(new, self._block(call))
        return new

    def _block(self, call: Call) -> nn.Module:
        """Return the module that has the parameters."""
        return call.sources[-1][0] if self.contextual else call.module


def through(chain: Chain) -> View | None:
    """Return the view of a module's output transformed by a chain; None if the chain changes
    nothing.
    """
    factor = None if parameters_of(chain) else constant_of(chain)
    chain = chain if factor is None else times(factor)
    return Adjusted(chain) if chain else None


class Copied(View):
    """A copy of a tensor that the model later overwrites, viewed through `inner`; a written value
    is copied too.
    """

    at_once = True

    def __init__(self, inner: View) -> None:
        self.inner = inner
        self.writes_through = inner.writes_through
        self.contextual = inner.contextual

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x, call).clone()

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, new.clone(), call)


class WithBatchAxis(Derived):
    """A tensor with one row for the whole batch (position embeddings), shown with the batch axis of
    its source.
    """

    def get(self, x: Tensor, call: Call) -> Tensor:
        batch = call.sources[0][1].shape[0]
        rows = x if x.ndim == 3 else x.unsqueeze(0)
        return rows.expand(batch, -1, -1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new


@dataclass(frozen=True, repr=False)
class SeveralStreams(View):
    """Several residual streams, shown as ``batch pos (stream d_model) -> batch pos stream
    d_model``; streams that already have an axis are unchanged.

    Attributes:
        n_streams: the number of streams.
        first: whether the stream axis is the first (AltUp). The first stream begins with the
            embeddings; how the others are made from it, and how they are combined after the blocks,
            is not declared.
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
    """The weights of streams, including the 1 that the model adds (AltUp): either mixing weights,
    or the weights with which each stream receives the result.

    ``... (to_stream stream) -> ... stream to_stream``, or ``... stream -> ... stream``.
    """

    n_streams: int

    def get(self, x: Tensor, call: Call) -> Tensor:
        if x.shape[-1] == self.n_streams:
            return x + 1
        return split(x, self.n_streams).mT + self._identity(x)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if x.shape[-1] == self.n_streams:
            return new - 1
        return (new - self._identity(x)).mT.flatten(-2)

    def _identity(self, x: Tensor) -> Tensor:
        """Return the identity matrix."""
        return torch.eye(self.n_streams, dtype=x.dtype, device=x.device)


@dataclass(frozen=True, repr=False)
class PositionsFirst(View):
    """Tensors that have positions before the batch: ``pos batch ... -> batch pos ...`` (XLNet).

    Attributes:
        embeddings: for a stack, whether the embeddings before its blocks have positions first too.
        end: whether the norm after the blocks and the output layer do (ChatGLM 2, whose embeddings
            have the batch first).
    """

    embeddings: bool = True
    end: bool = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.transpose(0, 1)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        turned = new.transpose(0, 1)
        # The model may take a view of it (FSMT).
        return turned.contiguous() if x.is_contiguous() else turned


@dataclass(frozen=True, repr=False)
class FlatRows(View):
    """The rows of a module without a batch axis: ``(batch pos) d -> batch pos d``, with the batch
    size of the last source.

    Attributes:
        heads: ``(batch pos head) d -> batch pos head d``, also with that source's number of
            positions.
    """

    heads: bool = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        if x.ndim > 2:
            return x
        axes = call.sources[-1][1].shape[: 1 + self.heads]
        return x.unflatten(0, (*axes, -1))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim > 2 else new.flatten(0, 1 + self.heads)


class ExpertRows(View):
    """The input of an expert, ``... row d -> row d``: it may have axes of size one (Hunyuan)."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x if x.ndim == 2 else x.flatten(0, -2)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new if x.ndim == 2 else new.view(*x.shape[:-1], new.shape[-1])


class Composed(View):
    """The composition of two views: `outer` applied to the result of `inner`.

    Args:
        inner: the view of the site's tensor.
        outer: the view applied to the result of `inner`.
    """

    def __init__(self, inner: View, outer: View) -> None:
        self.inner = inner
        self.outer = outer
        self.writes_through = inner.writes_through
        self.contextual = inner.contextual or outer.contextual
        self.parameters = (*inner.parameters, *outer.parameters)

    def constants(self, call: Call) -> tuple[object, ...]:
        return (*self.inner.constants(call), *self.outer.constants(call))

    def get(self, x: Tensor, call: Call) -> Tensor:
        act = self.outer.get(self.inner.get(x, call), call)
        # A written-through tensor takes the site's place in the autograd graph: it must not be a
        # view of the tensor that it replaces.
        return act.clone() if self.writes_through and act.requires_grad else act

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, self.outer.put(self.inner.get(x, call), new, call), call)
