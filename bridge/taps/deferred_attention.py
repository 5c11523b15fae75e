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
        seen: the versions of what it is computed from.
        waits: it can be computed after the run, whose precision `torch.autocast` did not choose.
    """

    __slots__ = ("_waits", "attention", "channel")

    def __init__(
        self, view: View, attention: AttentionCall, channel: str, call: Call, seen: tuple[int, ...], waits: bool
    ) -> None:
        self.view, self.x, self.attention, self.channel, self.call = view, attention.query, attention, channel, call
        self._seen, self._waits = seen, waits

    @property
    def n_rows(self) -> int:
        return self.attention.n_queries

    @property
    def keeps_more(self) -> bool:
        """Queries and keys grow with the prompt; scores and patterns with its square."""
        return False

    def _versions(self) -> tuple[int, ...]:
        return self.attention.versions()

    def _at_site(self, rows: slice | Tensor | None) -> Tensor:
        device = self.x.device.type
        attention = self.attention if rows is None else self.attention.of_queries(rows)
        with torch.autocast(device, enabled=False) if self._waits and autocasts(device) else nullcontext():
            scores = attention.scores()
            return scores if self.channel == "scores" else attention.pattern(scores, over=True)
