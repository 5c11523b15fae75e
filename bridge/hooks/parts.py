"""Hook functions that touch a part of scores or a pattern, heads and queries: no others are made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from adapters.imports import is_compiling
from adapters.views import Deferred
from bridge.hooks.context import HookFunction, Listener, NamedPoint

#: About how much memory scores and patterns take at once, where they are computed for some queries after the other.
MAX_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Part:
    """Some heads and queries of scores or a pattern, ``[batch head pos key_pos]``.

    Attributes:
        shape: of the whole, as its hook point shows it.
        heads, queries: which, in ascending order, on the CPU.
    """

    shape: tuple[int, int, int, int]
    heads: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Touched:
    """Which heads and queries of scores or a pattern a hook function touches.

    Attributes:
        heads: ``[head]``, whether it does, on the CPU.
        queries: ``[pos]``, likewise.
        max_bytes: it may be given some queries at a time, so that no more memory is needed; None: all at once.
    """

    heads: Tensor
    queries: Tensor
    max_bytes: int | None

    def __or__(self, other: Touched) -> Touched:
        bounds = [bound for bound in (self.max_bytes, other.max_bytes) if bound is not None]
        bound = min(bounds) if len(bounds) == 2 else None
        return Touched(self.heads | other.heads, self.queries | other.queries, bound)

    def parts(self, shape: tuple[int, int, int, int], dtype: torch.dtype, whole_queries: bool) -> list[Part]:
        """The parts that it may be given, one after the other.

        Args:
            shape: of the whole.
            dtype: of the scores.
            whole_queries: all queries at once, whatever the bound.
        """
        heads, queries = (x.nonzero()[:, 0] for x in (self.heads, self.queries))
        if not len(heads) or not len(queries):
            return []
        bound = None if whole_queries else self.max_bytes
        rows = len(queries) if bound is None else rows_within(bound, shape, heads, dtype)
        return [Part(shape, heads, piece) for piece in queries.split(rows)]


def rows_within(max_bytes: int, shape: tuple[int, ...], heads: Sized, dtype: torch.dtype) -> int:
    """How many queries' scores and patterns may be in memory at once.

    Args:
        max_bytes: how much of it they may take.
        shape: of the scores of all heads and queries.
        heads: of these heads.
        dtype: of the scores.
    """
    # Scores, their softmax in float32 or finer, what a function is shown, and what it makes of that.
    return max(1, max_bytes // (4 * max(4, dtype.itemsize) * shape[0] * len(heads) * shape[3]))


def entries_of(what: str, index: Any, length: int, name: str) -> list[int]:
    """Which entries of an axis an index means, counted from the front, as often and in the order that it names them.

    Args:
        what: the axis counts, for the error.
        index: a number, a slice, or several numbers, or a truth value for each entry; None: all.
        length: of the axis.
        name: of the hook point, for the error.

    Raises:
        IndexError: there are none such.
        TypeError: it is something else.
    """
    places = range(length)
    if index is None or isinstance(index, slice):
        found = list(places[slice(None) if index is None else index])
    else:
        given = index.tolist() if hasattr(index, "tolist") else index
        several = list(given) if isinstance(given, Sequence) else [given]
        if isinstance(given, Sequence) and several and all(isinstance(x, bool) for x in several):
            if len(several) != length:
                raise IndexError(f"{what} is {index}, {len(several)} truth values, and {name} has {length} of them")
            several = [place for place, there in zip(places, several, strict=True) if there]
        if any(isinstance(x, bool) or not hasattr(x, "__index__") for x in several):
            raise TypeError(f"{what} is {index!r}; it must be a whole number, several, or a slice")
        try:
            found = [places[x] for x in several]
        except IndexError as error:
            raise IndexError(f"{what} is {index}, and {name} has {length} of them") from error
    if not found:
        raise IndexError(f"{what} is {index}, which is none of the {length} at {name}")
    return found


@dataclass(frozen=True)
class KeptHeads:
    """Which heads of an activation a cache keeps.

    Attributes:
        axis: which counts heads.
        heads: which, in ascending order.
        n: how many the activation has.
        name: what the cache calls them, such as ``blocks.5.attn.hook_pattern[1, 6]``.
    """

    axis: int
    heads: tuple[int, ...]
    n: int
    name: str

    def of(self, act: Tensor | Deferred) -> Tensor | Deferred:
        """These heads of an activation, without the rest of it; of what waits, what will compute them alone."""
        index = torch.tensor(self.heads)
        if isinstance(act, Deferred):
            some = act.of_heads(index)
            if some is not None:
                return some
            act = act.value(self.name)
        return picked(act, {self.axis: index}).clone()

    def within(self, asked: Any) -> list[int]:
        """The places of some heads among these.

        Args:
            asked: an index of heads, as the activation counts them; None: all.

        Raises:
            IndexError: there are no such heads.
            KeyError: they were not kept.
        """
        wanted = entries_of("heads", asked, self.n, self.name)
        if lost := sorted(set(wanted) - set(self.heads)):
            raise KeyError(
                f"of {self.name.partition('[')[0]}, this cache keeps the heads {list(self.heads)}, not {lost}"
            )
        return [self.heads.index(head) for head in wanted]


class TouchesPart:
    """A hook function that says which heads and queries of scores or a pattern it touches: no others are made for it.

    Where they are made all the same, it is called as any function is, with all.
    """

    def touched(self, shape: tuple[int, int, int, int], hook: Any) -> Touched | None:
        """Which it touches; None: it needs all.

        Args:
            shape: ``[batch, head, pos, key_pos]``, of all.
            hook: the hook point.

        Raises:
            IndexError: there are no such heads or queries.
        """
        raise NotImplementedError

    def within(self, part: Part, hook: Any) -> HookFunction:
        """What is called with a part, which holds what it touches, and perhaps more.

        Args:
            part: the part.
            hook: the hook point.
        """
        raise NotImplementedError


def picked(x: Tensor, chosen: Mapping[int, Tensor]) -> Tensor:
    """Some entries along some axes.

    Args:
        x: the tensor.
        chosen: by axis, which entries, on the CPU.

    Returns:
        A view of `x` where each axis' entries follow each other, else a copy.
    """
    for axis, index in chosen.items():
        run = as_slice(index)
        x = x.index_select(axis, index.to(x.device)) if run is None else x[(slice(None),) * axis + (run,)]
    return x


def as_slice(index: Tensor) -> slice | None:
    """A slice of the same entries, where they follow each other.

    Args:
        index: whole numbers, on the CPU.
    """
    first, end = int(index[0]), int(index[-1]) + 1
    return slice(first, end) if torch.equal(index, torch.arange(first, max(first, end))) else None


def index_on(index: Tensor, device: torch.device) -> slice | Tensor:
    """What entries are indexed with: a slice, where they follow each other.

    Args:
        index: whole numbers, on the CPU.
        device: of what is indexed.
    """
    run = as_slice(index)
    return index.to(device) if run is None else run


def put_back(x: Tensor, chosen: Mapping[int, Tensor], new: Tensor) -> Tensor:
    """The tensor with other entries where `picked` takes some from; written over where no graph or `vmap` needs it.

    Args:
        x: the tensor.
        chosen: by axis, which entries, each once, on the CPU.
        new: what is there now, which is no part of `x`.
    """
    if not chosen:
        return new
    (axis, index), *rest = chosen.items()
    if rest:
        # A copy: a view may not be copied onto itself.
        new = put_back(picked(x, {axis: index}).clone(), dict(rest), new)
    index = index.to(x.device)
    if torch.is_grad_enabled() or is_compiling() or is_functorch_wrapped_tensor(new):
        return x.index_copy(axis, index, new)
    return x.index_copy_(axis, index, new)


def within(listener: Listener, part: Part, hook: NamedPoint) -> Listener:
    """A listener that is given a part of the activation in place of the whole.

    Args:
        listener: its function says that it touches nothing else.
        part: the part.
        hook: the hook point.
    """
    assert isinstance(listener.fn, TouchesPart)
    made = Listener(listener.kind, listener.fn.within(part, hook), listener.scope)
    made.in_run = listener.in_run
    return made
