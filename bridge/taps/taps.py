"""Which tap is for which kind of site."""

from __future__ import annotations

from torch import nn

from bridge.taps.attention import AttentionTap
from bridge.taps.experts import BatchedExpertsTap, ExpertsTap, RouterTap
from bridge.taps.recurrence import RecurrenceTap
from bridge.taps.tap import Tap

#: The tap for each kind of site that is not simply a module's input or output.
TAPS: dict[str, type[Tap]] = {
    "attention": AttentionTap,
    "softmax": AttentionTap,
    "experts": ExpertsTap,
    "batched experts": BatchedExpertsTap,
    "router": RouterTap,
    "recurrence": RecurrenceTap,
}


def tap_on(kind: str, module: nn.Module) -> Tap:
    """The tap of this kind on a module: the one that another bridge around the model has put there, or a new one."""
    there = module.__dict__.get("forward")
    return there if type(there) is TAPS[kind] else TAPS[kind](module)
