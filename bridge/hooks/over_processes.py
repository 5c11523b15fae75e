"""Showing an activation of which each process computes a part, or all of it, to hooks that stand on all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adapters.gathering import Cut
from bridge.hooks.hook_point import HookPoint


def agreed_part(x: Tensor, cut: Cut, points: Sequence[HookPoint], see: Callable[[Tensor], Tensor]) -> Tensor:
    """What hooks make of a tensor, as the part of it that this process is to go on with.

    Args:
        x: the part of this process, or all of it.
        cut: how it is spread.
        points: the hook points that are shown it.
        see: shows them the whole, and returns what they make of it.

    Raises:
        DifferentEditsError: they make something else on another process, or failed there.
    """
    assert cut.peers is not None
    kinds = {point.name: {listener.kind for listener in point.visible_listeners()} for point in points}
    editors = [name for name, found in kinds.items() if not found <= {"read"}]
    followed = [name for name, found in kinds.items() if "follow" in found]
    if followed:  # a trace may ask on one process alone
        cut.peers.meet(followed[0])
    everything = cut.whole(x)
    new = cut.peers.agreed(lambda: see(everything), editors[0]) if editors else see(everything)
    return x if new is everything and not (editors and torch.is_grad_enabled()) else cut.part(new)
