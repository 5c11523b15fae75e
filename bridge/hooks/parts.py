"""Hook functions for some heads and queries of scores or a pattern: only these are computed."""

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

#: The approximate memory of scores and patterns that are computed in chunks of queries.
MAX_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Part:
    """Some heads and queries of scores or a pattern, ``[batch head pos key_pos]``.

    Attributes:
        shape: the shape of the whole activation.
        heads, queries: their indices, in ascending order, on the CPU.
    """

    shape: tuple[int, int, int, int]
    heads: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Touched:
    """The heads and queries of scores or a pattern that a hook function touches.

    Attributes:
        heads: ``[head]``, a mask on the CPU.
        queries: ``[pos]``, a mask on the CPU.
        max_bytes: the function may be called with chunks of queries that need no more memory than
            this; None: with all at once.
    """

    heads: Tensor
    queries: Tensor
    max_bytes: int | None

    def __or__(self, other: Touched) -> Touched:
        bounds = [bound for bound in (self.max_bytes, other.max_bytes) if bound is not None]
        bound = min(bounds) if len(bounds) == 2 else None
        return Touched(self.heads | other.heads, self.queries | other.queries, bound)

    def parts(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, whole_queries: bool
    ) -> list[Part]:
        """Return the parts to pass to the function, one after the other.

        Args:
            shape: the shape of the whole activation.
            dtype: the dtype of the scores.
            whole_queries: pass all queries at once, whatever the bound.
        """
        heads, queries = (x.nonzero()[:, 0] for x in (self.heads, self.queries))
        if not len(heads) or not len(queries):
            return []
        bound = None if whole_queries else self.max_bytes
        rows = len(queries) if bound is None else rows_within(bound, shape, heads, dtype)
        return [Part(shape, heads, piece) for piece in queries.split(rows)]


def rows_within(max_bytes: int, shape: tuple[int, ...], heads: Sized, dtype: torch.dtype) -> int:
    """Return the number of queries whose scores and patterns may be in memory at once.

    Args:
        max_bytes: the memory that they may take.
        shape: the shape of the scores of all heads and queries.
        heads: the number of heads to count.
        dtype: the dtype of the scores.
    """
    # Scores, their softmax in at least float32, a function's argument, and its result.
    return max(1, max_bytes // (4 * max(4, dtype.itemsize) * shape[0] * len(heads) * shape[3]))


def entries_of(what: str, index: Any, length: int, name: str) -> list[int]:
    """Return the non-negative indices that an index selects along an axis, in its own order.

    Args:
        what: the name of the entries, for the error.
        index: a number, a slice, or several numbers, or a truth value for each entry; None: all.
        length: the length of the axis.
        name: the name of the hook point, for the error.

    Raises:
        IndexError: the index is out of range.
        TypeError: it is something else.
    """
    if index is None or isinstance(index, slice):
        entries = list(range(length)[slice(None) if index is None else index])
    else:
        entries = _entries_listed(what, index, length, name)
    if not entries:
        raise IndexError(f"{what} is {index}, which is none of the {length} at {name}")
    return entries


def _entries_listed(what: str, index: Any, length: int, name: str) -> list[int]:
    """Return the entries that a number, several numbers, or truth values select (see
    `entries_of`).
    """
    index_or_list = index.tolist() if hasattr(index, "tolist") else index
    is_list = isinstance(index_or_list, Sequence)
    values = list(index_or_list) if is_list else [index_or_list]
    if is_list and values and all(isinstance(x, bool) for x in values):
        if len(values) != length:
            raise IndexError(
                f"{what} is {index}, {len(values)} truth values, and {name} has {length} of them"
            )
        return [place for place, is_chosen in enumerate(values) if is_chosen]
    if any(isinstance(x, bool) or not hasattr(x, "__index__") for x in values):
        raise TypeError(f"{what} is {index!r}; it must be a whole number, several, or a slice")
    try:
        return [range(length)[x] for x in values]
    except IndexError as error:
        raise IndexError(f"{what} is {index}, and {name} has {length} of them") from error


@dataclass(frozen=True)
class KeptHeads:
    """The heads of an activation that a cache keeps.

    Attributes:
        axis: the axis of heads.
        heads: their indices, in ascending order.
        n: the number of heads in the activation.
        name: their name in the cache, such as ``blocks.5.attn.hook_pattern[1, 6]``.
    """

    axis: int
    heads: tuple[int, ...]
    n: int
    name: str

    def of(self, act: Tensor | Deferred) -> Tensor | Deferred:
        """Select these heads of an activation; for a deferred one, compute only these."""
        index = torch.tensor(self.heads, device="cpu")
        if isinstance(act, Deferred):
            some = act.of_heads(index)
            if some is not None:
                return some
            act = act.value(self.name)
        return picked(act, {self.axis: index}).clone()

    def within(self, index: Any) -> list[int]:
        """Return the positions of some heads among the kept ones.

        Args:
            index: an index of heads in the full activation; None: all.

        Raises:
            IndexError: there are no such heads.
            KeyError: they were not kept.
        """
        heads = entries_of("heads", index, self.n, self.name)
        if lost := sorted(set(heads) - set(self.heads)):
            raise KeyError(
                f"of {self.name.partition('[')[0]}, this cache keeps the heads {list(self.heads)},"
                f" not {lost}"
            )
        return [self.heads.index(head) for head in heads]


class TouchesPart:
    """A hook function that declares the heads and queries it touches, so that only these are
    computed.

    If all are computed anyway, it is called like any function, with the whole activation.
    """

    def touched(self, shape: tuple[int, int, int, int], hook: Any) -> Touched | None:
        """Return the touched heads and queries; None if all are needed.

        Args:
            shape: ``[batch, head, pos, key_pos]``, the shape of the whole activation.
            hook: the hook point.

        Raises:
            IndexError: there are no such heads or queries.
        """
        raise NotImplementedError

    def within(self, part: Part, hook: Any) -> HookFunction:
        """Return the function to call with a part that holds at least what it touches.

        Args:
            part: the part.
            hook: the hook point.
        """
        raise NotImplementedError


def picked(x: Tensor, chosen: Mapping[int, Tensor]) -> Tensor:
    """Select entries along several axes.

    Args:
        x: the tensor.
        chosen: the indices of the entries by axis, on the CPU.

    Returns:
        A view of `x` if the entries along each axis are consecutive, otherwise a copy.
    """
    for axis, index in chosen.items():
        run = as_slice(index)
        if run is None:
            x = x.index_select(axis, index.to(x.device))
        else:
            x = x[(slice(None),) * axis + (run,)]
    return x


def as_slice(index: Tensor) -> slice | None:
    """Return the entries as a slice, if they are consecutive.

    Args:
        index: integers, on the CPU.
    """
    first = int(index[0])
    end = int(index[-1]) + 1
    is_run = torch.equal(index, torch.arange(first, max(first, end), device="cpu"))
    return slice(first, end) if is_run else None


def index_on(index: Tensor, device: torch.device) -> slice | Tensor:
    """Return an index for the entries: a slice if they are consecutive.

    Args:
        index: integers, on the CPU.
        device: the device of the indexed tensor.
    """
    run = as_slice(index)
    return index.to(device) if run is None else run


def put_back(x: Tensor, chosen: Mapping[int, Tensor], new: Tensor) -> Tensor:
    """Write entries back to where `picked` selected them; in place if no graph or `vmap` needs the
    tensor.

    Args:
        x: the tensor.
        chosen: the indices of the entries by axis, without duplicates, on the CPU.
        new: the new entries, a tensor separate from `x`.
    """
    if not chosen:
        return new
    (axis, index), *rest = chosen.items()
    if rest:
        # A copy: a view cannot be copied onto itself.
        new = put_back(picked(x, {axis: index}).clone(), dict(rest), new)
    index = index.to(x.device)
    if torch.is_grad_enabled() or is_compiling() or is_functorch_wrapped_tensor(new):
        return x.index_copy(axis, index, new)
    return x.index_copy_(axis, index, new)


def within(listener: Listener, part: Part, hook: NamedPoint) -> Listener:
    """Return a listener that receives a part of the activation instead of the whole.

    Args:
        listener: a listener whose function declares that it touches nothing else.
        part: the part.
        hook: the hook point.
    """
    assert isinstance(listener.fn, TouchesPart)
    of_part = Listener(listener.kind, listener.fn.within(part, hook), listener.scope)
    of_part.in_run = listener.in_run
    return of_part
