"""Reaching the activations inside the experts of a mixture, which keep their weights in one parameter for all.

Only the layers that someone listens to compute one expert after the other, by the model's own forward; all others keep
the implementation that the model was loaded with (a grouped multiplication, in which no expert stands alone).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.experts import gate_and_up, joined
from adapters.views import Call, Kwargs
from bridge.taps.experts_watch import ExpertsWatch, operands
from bridge.taps.spread_experts import SpreadExpertsWatch, all_numbered, is_spread
from bridge.taps.tap import RunCall, Tap, Watch


class ExpertsTap(Tap):
    """For modules whose own forward runs each expert's two projections, `gate_up_proj` (or `up_proj`, where there is no
    gate) and `down_proj`, in turn.

    Its channels are ``{expert}.in`` and ``{expert}.out``, what the expert is given and returns, ``[row, d_model]``, and
    ``{expert}.gate``, ``{expert}.pre`` and ``{expert}.post``, ``[row, d_expert]``. There is a row for each token that
    was sent to the expert, in the order of HookedTransformer (by rank among the token's experts, then by position). An
    expert that no token was sent to has no rows.
    """

    def watched(self, *args: object, **kwargs: object) -> Any:
        """The module's forward when somebody listens."""
        call = Call(self.module, args, kwargs)
        if is_spread(self.module):
            watch: ExpertsWatch = SpreadExpertsWatch(self, call)
            with watch, all_numbered(self.module):
                output = inspect.unwrap(type(self.module).forward)(self.module, *args, **kwargs)
        else:
            with ExpertsWatch(self, call) as watch:
                output = self._one_by_one(*args, **kwargs)
        watch.show_idle_experts()
        return output

    def _one_by_one(self, *args: object, **kwargs: object) -> Any:
        module: Any = self.module
        if self.own is None:
            return inspect.unwrap(type(module).forward)(module, *args, **kwargs)
        # Someone else's forward wraps the model's own (accelerate's, which brings the weights).
        config = module.config
        module.__dict__["config"] = copy.copy(config)
        module.config._experts_implementation_internal = "eager"
        try:
            return self.original(*args, **kwargs)
        finally:
            module.__dict__["config"] = config


class BatchedExpertsTap(Tap):
    """For modules whose forward multiplies the tokens of all experts in one product, ``[expert, row, d]``.

    Its channels are those of `ExpertsTap`. Every expert has a row for every token: its input is the token times
    its weight, which is zero where it is not chosen.
    """

    def watched(self, *args: object, **kwargs: object) -> Any:
        """The module's forward when somebody listens."""
        with _BatchesWatch(self, Call(self.module, args, kwargs)):
            return self.original(*args, **kwargs)


class _BatchesWatch(Watch):
    """Shows what enters and leaves the two products of all experts while it is active."""

    def __init__(self, tap: BatchedExpertsTap, call: Call) -> None:
        super().__init__(RunCall(tap, call))
        self._tap, self._call = tap, call

    def call(self, func: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
        """Shows what enters and leaves the products."""
        module: Any = self._tap.module
        if func not in _BATCHED_PRODUCTS:
            return func(*args, **kwargs)
        x, weight = operands(args, kwargs)
        if weight is module.down_proj:
            return self._each("out", func(self._each("post", x), *args[1:], **kwargs))
        if weight is not module.gate_up_proj:
            return func(*args, **kwargs)
        gate, up = gate_and_up(module, func(self._each("in", x), *args[1:], **kwargs))
        return joined(module, self._each("gate", gate), self._each("pre", up))

    def _each(self, part: str, x: Any) -> Tensor:
        """Shows the rows of each expert that somebody listens to."""
        active = [e for e in range(len(x)) if self._tap.active_points((f"{e}.{part}",))]
        if not active:
            return x
        rows = list(x.unbind(0))
        for e in active:
            rows[e] = self._tap.show(f"{e}.{part}", rows[e], self._call)
        return torch.stack(rows)


_BATCHED_PRODUCTS = {torch.bmm, Tensor.bmm}
