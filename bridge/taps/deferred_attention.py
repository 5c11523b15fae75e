"""Scores and patterns of attention that ran with another kernel, for those who only look at them.

A kernel such as scaled-dot-product attention never holds the scores. The model's own ``eager_attention_forward``, given
the same queries, keys and mask once more, does: when a cache is asked for them, as far as that can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adapters.views import Call, Deferred, View
from bridge.hooks.hook_point import STATE, HookPoint, Listener
from bridge.taps.attention_mask import additive_mask

SOFTMAXES = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}


def autocasts(device: str) -> bool:
    """Whether `torch.autocast` is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class _Found(Exception):
    """Leaves the attention function with what was looked for."""

    def __init__(self, **found: Tensor) -> None:
        self.found = found


class _Look(TorchFunctionMode):
    """Stops at the first softmax, with what enters it (``scores``) and, where it is wanted, leaves it (``pattern``)."""

    def __init__(self, pattern: bool) -> None:
        super().__init__()
        self.pattern = pattern

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in SOFTMAXES:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        if self.pattern:
            raise _Found(scores=scores, pattern=func(*args, **kwargs))
        raise _Found(scores=scores)


def _kept(x: Tensor) -> Tensor:
    """What a cache may hold of an argument: no graph, and nothing that could change unseen."""
    return x.clone() if x.is_inference() else x.detach() if x.requires_grad else x


class AttentionCall:
    """What one attention function was called with.

    Args:
        eager: the model's own function that computes scores in full.
        implementation: the attention implementation that ran.
        module, query, key, mask, kwargs: what it was called with, but for the values.
    """

    __slots__ = ("eager", "implementation", "key", "kwargs", "mask", "module", "query", "seen")

    def __init__(
        self,
        eager: Callable[..., Any],
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self.eager, self.implementation, self.module = eager, implementation, module
        self.query, self.key, self.mask = _kept(query), _kept(key), mask
        self.kwargs = {name: _kept(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        self.seen = self.versions()

    def versions(self) -> tuple[int, ...]:
        """Of everything that scores and pattern depend on."""
        others = [x for x in (self.mask, *self.kwargs.values()) if isinstance(x, Tensor)]
        return tuple([x._version for x in (self.query, self.key, *others) if not x.is_inference()])

    def compute(self, pattern: bool) -> dict[str, Tensor]:
        """The ``scores`` and, where it is wanted, the ``pattern``, as the model's eager attention has them."""
        with torch.no_grad(), STATE.fresh(), _Look(pattern):
            mask = additive_mask(self.implementation, self.module, self.query, self.key, self.mask, self.kwargs)
            try:
                # Values have no part in this: the keys stand in for them, so that nobody need keep them.
                self.eager(self.module, self.query, self.key, self.key, mask, **self.kwargs)
            except _Found as found:
                return found.found
        raise RuntimeError(f"{self.eager.__module__}.{self.eager.__name__} computed no softmax")

    def show(self, looking: Sequence[tuple[str, HookPoint, Listener]]) -> None:
        """Gives listeners that only look the ``scores`` or the ``pattern``, or what will compute them."""
        # With autocast the precision is chosen by the run: it cannot be left to a later time. Keys of more than these
        # queries are a past: they take more room than the scores, and later runs may write into them.
        waits = self.query.shape[2] == self.key.shape[2] and not autocasts(self.query.device.type)
        call = Call(self.module, (self.query,), self.kwargs)
        now = [channel for channel, _, listener in looking if not (waits and listener.lazy)]
        computed = self.compute("pattern" in now) if now else {}
        for channel, point, listener in looking:
            if waits and listener.lazy:
                listener.fn(DeferredAttention(point.view, self, channel, call), hook=point)
            else:
                listener.fn(point.view.get(computed[channel], call), hook=point)


class DeferredAttention(Deferred):
    """Scores or a pattern, computed when asked for.

    Args:
        view: of the hook point.
        attention: the call that they belong to.
        channel: ``scores`` or ``pattern``.
        call: as the view sees it.
    """

    __slots__ = ("attention", "channel")

    def __init__(self, view: View, attention: AttentionCall, channel: str, call: Call) -> None:
        self.view, self.x, self.attention, self.channel, self.call = view, attention.query, attention, channel, call
        self._seen = attention.seen

    def _versions(self) -> tuple[int, ...]:
        return self.attention.versions()

    def _at_site(self) -> Tensor:
        device = self.x.device.type
        with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
            return self.attention.compute(self.channel == "pattern")[self.channel]
