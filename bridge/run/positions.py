"""Which positions of an activation to keep."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.views import Deferred
from bridge.hooks.hook_point import HookPoint

#: A tuple is a range, ``(start, stop)`` or ``(start, stop, step)``, as in the methods of a cache; a list holds indices.
PosSlice = int | slice | tuple[int | None, ...] | Sequence[int] | None
_AXES = ("pos", "decoder_pos", "key_pos", "decoder_key_pos")


def check_pos_slice(pos_slice: PosSlice) -> None:
    """Refuses what chooses no positions.

    Raises:
        TypeError: it is no index, slice or list of indices.
    """
    if pos_slice is None or isinstance(pos_slice, slice):
        return
    wanted = pos_slice if isinstance(pos_slice, list | tuple | range) else [pos_slice]
    for position in wanted:
        if position is None and isinstance(pos_slice, tuple):
            continue  # an open end of a range
        if type(position) is not int:
            raise TypeError(f"pos_slice is {pos_slice!r}; it must be an index, a slice, or a list of indices")


def position_axis(hook: HookPoint) -> int | None:
    """Which axis of the activation counts positions (of queries), or None."""
    return _position_axis(hook.point.axes)


@functools.cache
def _position_axis(said: str) -> int | None:
    axes = said.split()
    return next((axes.index(axis) for axis in _AXES if axis in axes), None)


def picked_positions(x: Tensor | Deferred, pos_slice: PosSlice, hook: HookPoint) -> Tensor:
    """The chosen positions of an activation, as a copy, so that the rest of it can be freed.

    Args:
        x: the activation, or what computes some rows of it, which are positions.
        pos_slice: an index (the axis stays), a slice, a tuple ``(start, stop)``, or a list of indices; None: all. See
            `check_pos_slice`.
        hook: its hook point.

    Raises:
        IndexError: there is no such position.
    """
    axis = position_axis(hook)
    if isinstance(x, Deferred):
        rows = axis is not None and axis == len(hook.point.axes.split()) - 2
        if not rows or pos_slice is None:
            x = x.value(hook.name)
        else:
            return x.value(hook.name, _index(pos_slice, x.n_rows, hook, x.x.device))
    if axis is None or pos_slice is None:
        return x
    length = x.shape[axis]
    if type(pos_slice) is int and -length <= pos_slice < length:  # at once: hundreds of times in one run
        return x.narrow(axis, pos_slice % length, 1).clone()
    index = _index(pos_slice, length, hook, x.device)
    if isinstance(index, Tensor):
        return x.index_select(axis, index)
    start, stop, step = index.indices(length)
    if step == 1:
        return x.narrow(axis, start, stop - start).clone()
    return x[(slice(None),) * axis + (index,)].clone()


def _index(pos_slice: PosSlice, length: int, hook: HookPoint, device: torch.device) -> slice | Tensor:
    """What the chosen positions of so many are indexed with."""
    if isinstance(pos_slice, tuple):
        pos_slice = slice(*pos_slice)
    if isinstance(pos_slice, slice):
        if not range(length)[pos_slice]:
            raise IndexError(f"pos_slice is {pos_slice}, which is none of the {length} positions of {hook.name}")
        return pos_slice
    assert pos_slice is not None
    wanted = [pos_slice] if isinstance(pos_slice, int) else list(pos_slice)
    for position in wanted:
        if not -length <= position < length:
            raise IndexError(f"pos_slice is {pos_slice}; {hook.name} has {length} positions")
    if isinstance(pos_slice, int):
        return slice(pos_slice, (pos_slice + 1) or None)
    return torch.tensor([position % length for position in wanted], device=device)
