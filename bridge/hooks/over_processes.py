"""Showing an activation of which each process computes a part, or all of it, to hooks that stand on all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from adapters.gathering import Cut, agreed
from bridge.hooks.hook_point import HookPoint


def agreed_part(
    x: Tensor,
    cut: Cut | None,
    points: Sequence[HookPoint],
    see: Callable[[Tensor], Tensor],
    group: ProcessGroup | None = None,
) -> Tensor:
    """What hooks make of a tensor, as the part of it that this process continues with.

    Args:
        x: the part of this process, or all of it.
        cut: how it is cut; None: it is whole.
        points: the hook points that are shown it.
        see: shows them the whole, and returns what they make of it.
        group: the processes, where it is whole.

    Raises:
        DifferentEditsError: they make something else on another process, or failed there.
    """
    group = group if cut is None else cut.group
    editors = [point for point in points if any(listener.kind != "read" for listener in point.visible_listeners())]
    everything = x if cut is None else cut.whole(x)
    if editors:
        assert group is not None
        new = agreed(lambda: see(everything), editors[0].name, group)
    else:
        new = see(everything)
    if cut is None:
        return new
    return x if new is everything and not (editors and torch.is_grad_enabled()) else cut.part(new)
