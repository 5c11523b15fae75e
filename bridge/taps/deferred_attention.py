"""Scores and patterns that a cache holds, computed when it is asked for them."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from adapters.views import Call, Deferred, View
from bridge.taps.attention_call import AttentionCall


def autocasts(device: str) -> bool:
    """Whether `torch.autocast` is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class DeferredAttention(Deferred):
    """Scores or a pattern, computed when asked for.

    Args:
        view: of the hook point.
        attention: the call of the kernel.
        channel: ``scores`` or ``pattern``.
        call: as the view sees it.
    """

    __slots__ = ("attention", "channel")

    def __init__(self, view: View, attention: AttentionCall, channel: str, call: Call) -> None:
        self.view, self.x, self.attention, self.channel, self.call = view, attention.query, attention, channel, call
        self._seen = attention.versions()

    @property
    def keeps_more(self) -> bool:
        """Queries and keys grow with the prompt; scores and patterns with its square."""
        return False

    def _versions(self) -> tuple[int, ...]:
        return self.attention.versions()

    def _at_site(self) -> Tensor:
        device = self.x.device.type
        with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
            scores = self.attention.scores()
            return scores if self.channel == "scores" else self.attention.pattern(scores)
