"""Reaching the activations inside the experts of a mixture, which keep their weights in one parameter for all.

Only the layers that someone listens to compute one expert after the other, by the model's own forward; all others keep
the implementation that the model was loaded with (a grouped multiplication, in which no expert stands alone).
"""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adapters.views import Call
from bridge.attention_tap import TAPS as ATTENTION_TAPS
from bridge.attention_tap import ForwardTap, Tap


class ExpertsTap(ForwardTap):
    """For modules whose own forward runs each expert's two projections, `gate_up_proj` and `down_proj`, in turn.

    Its channels are ``{expert}.gate``, ``{expert}.pre`` and ``{expert}.post``: ``[row, d_mlp]``, with a row for each
    token that was sent to the expert, in the order of HookedTransformer (by rank among the token's experts, then by
    position). An expert that no token was sent to has no rows.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wanted(*self.points):
            return self.original(*args, **kwargs)
        call = Call(self.module, args, kwargs)
        with _ExpertsWatch(self, call) as watch:
            output = self._one_by_one(*args, **kwargs)
        watch.show_the_others()
        return output

    def _one_by_one(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if self.own is None:
            return inspect.unwrap(type(module).forward)(module, *args, **kwargs)
        # Someone else's forward stands before the model's own (accelerate's, which brings the weights).
        config = module.config
        module.__dict__["config"] = copy.copy(config)
        module.config._experts_implementation_internal = "eager"
        try:
            return self.original(*args, **kwargs)
        finally:
            module.__dict__["config"] = config


class _ExpertsWatch(TorchFunctionMode):
    """Shows what enters and leaves each expert's projections while it is active."""

    def __init__(self, tap: ExpertsTap, call: Call) -> None:
        super().__init__()
        self._tap, self._call = tap, call
        self._ran: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        x, weight, *rest = args
        module: Any = self._tap.module
        expert = _which(weight, module.down_proj)
        if expert is not None:
            return func(self._fire(expert, "post", x), weight, *rest, **kwargs)
        expert = _which(weight, module.gate_up_proj)
        made = func(x, weight, *rest, **kwargs)
        if expert is None:
            return made
        self._ran.add(expert)
        gate, pre = made.chunk(2, dim=-1)
        return torch.cat([self._fire(expert, "gate", gate), self._fire(expert, "pre", pre)], dim=-1)

    def _fire(self, expert: int, channel: str, x: Tensor) -> Tensor:
        return self._tap.fire(f"{expert}.{channel}", x, self._call)

    def show_the_others(self) -> None:
        """Shows the experts that did not run, without rows."""
        module: Any = self._tap.module
        for channel in self._tap.points:
            if int(channel.split(".")[0]) not in self._ran:
                self._tap.fire(channel, module.down_proj.new_empty(0, module.down_proj.shape[-1]), self._call)


#: The tap for each kind of site that is not simply a module's input or output.
TAPS: dict[str, type[Tap]] = {**ATTENTION_TAPS, "experts": ExpertsTap}


def _which(weight: Tensor, everyone: Tensor) -> int | None:
    """Which expert's part of a parameter this is, or None where it is none."""
    start = weight.data_ptr() - everyone.data_ptr()
    expert = start // (everyone.stride(0) * everyone.element_size())
    return expert if weight.shape == everyone.shape[1:] and 0 <= expert < len(everyone) else None


_ATTACHED: weakref.WeakKeyDictionary[nn.Module, dict[str, Tap]] = weakref.WeakKeyDictionary()


def tap_on(kind: str, module: nn.Module) -> Tap:
    """The tap of this kind on a module: one for all bridges around the model."""
    taps = _ATTACHED.setdefault(module, {})
    if kind not in taps:
        taps[kind] = TAPS[kind](module)
    return taps[kind]
