"""Seeing each expert's projections while the module that holds all of them computes one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.experts import first_projection, gate_and_up, has_gate, joined, stacked, width
from adapters.observe.functions import LINEAR_PRODUCTS
from adapters.views import Call, Kwargs
from bridge.taps.tap import RunCall, Tap, Watch

#: What adds a bias to a product.
SUMS = {torch.add, Tensor.add, Tensor.__add__}


class ExpertsWatch(Watch):
    """Shows what enters and leaves each expert's projections while it is active, by `ExpertsTap`'s channels.

    Args:
        tap: the tap.
        call: the call of the module.
    """

    def __init__(self, tap: Tap, call: Call) -> None:
        super().__init__(RunCall(tap, call))
        self._tap, self._call = tap, call
        self._ran: set[int] = set()
        self._first, self._stacked = first_projection(tap.module), stacked(tap.module)
        self._given: dict[int, Tensor] = {}

    def call(self, func: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
        """Shows what enters and leaves the projections."""
        if func not in LINEAR_PRODUCTS and func not in SUMS:
            return func(*args, **kwargs)
        x, other = operands(args, kwargs)
        module: Any = self._tap.module
        if self._stacked:
            return self._of_stacked(func, x, other, args, kwargs)
        if func in LINEAR_PRODUCTS:
            for weight, channel in ((self._first, "in"), ("down_proj", "post")):
                expert = self.which(other, weight)
                if expert is not None:
                    x = self._show(expert, channel, x)
                    args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})
        made = self.made(func, args, kwargs)
        if (func in SUMS) != module.has_bias:
            return made
        # What a projection makes is complete when its bias, where there is one, is added to the product.
        ends = "_bias" if module.has_bias else ""
        expert = self.which(other, f"down_proj{ends}")
        if expert is not None:
            return self._show(expert, "out", made)
        expert = self.which(other, f"{self._first}{ends}")
        if expert is None:
            return made
        self._ran.add(expert)
        if not has_gate(module):
            return self._show(expert, "pre", made)
        gate, pre = gate_and_up(module, made)
        return joined(module, self._show(expert, "gate", gate), self._show(expert, "pre", pre))

    def _of_stacked(
        self, func: Callable[..., Any], x: Any, other: Any, args: tuple[object, ...], kwargs: Kwargs
    ) -> Any:
        """Shows what enters and leaves projections that are apart: gate and up are given the same."""
        if func in LINEAR_PRODUCTS:
            for part, channel in (("W_gate", "gate"), ("W_in", "pre"), ("W_out", "out")):
                expert = _which(other, self._stacked[part], turned=part != "W_out")
                if expert is None:
                    continue
                self._ran.add(expert)
                if part == "W_out":
                    x = self._show(expert, "post", x)
                elif expert not in self._given:
                    x = self._given[expert] = self._show(expert, "in", x)
                else:
                    x = self._given[expert]
                return self._show(expert, channel, func(x, *args[1:], **kwargs))
        return func(*args, **kwargs)

    def which(self, weight: Any, name: str) -> int | None:
        """Which expert's part of a parameter this is; None where it is none.

        Args:
            weight: an operand.
            name: of the parameter.
        """
        return _which(weight, getattr(self._tap.module, name))

    def made(self, func: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
        """What a product or a sum is."""
        return func(*args, **kwargs)

    def _show(self, expert: int, channel: str, x: Tensor) -> Tensor:
        return self._tap.show(f"{expert}.{channel}", x, self._call)

    def show_idle_experts(self) -> None:
        """Shows the experts that did not run, without rows."""
        module: Any = self._tap.module
        shown: set[str] = set()
        # One after the other: a hook may let go of points, or ask for further ones.
        while waiting := [channel for channel in self._tap.points if channel not in shown]:
            channel = waiting[0]
            shown.add(channel)
            expert, part = channel.split(".")
            if int(expert) not in self._ran:
                cut = self._tap.cuts.get(channel)
                neurons = width(module) // (1 if cut is None else cut.parts)
                size = self._call.input.shape[-1] if part in ("in", "out") else neurons
                self._tap.show(channel, self._call.input.new_empty(0, size), self._call)


def operands(args: tuple[object, ...], kwargs: Kwargs) -> tuple[Any, Any]:
    """The two tensors of a product or a sum, however they are named."""
    first = args[0] if args else kwargs.get("input")
    names = ("other", "weight", "mat2")
    return first, args[1] if len(args) > 1 else next((kwargs[name] for name in names if name in kwargs), None)


def _which(weight: Any, everyone: Tensor, *, turned: bool = False) -> int | None:
    """Which expert's part of a parameter, or of its transpose (``turned``), this is; None where it is none."""
    shape = everyone.shape[:0:-1] if turned else everyone.shape[1:]
    if not isinstance(weight, Tensor) or weight.shape != shape:
        return None
    start = weight.data_ptr() - everyone.data_ptr()
    expert = start // (everyone.stride(0) * everyone.element_size())
    return expert if 0 <= expert < len(everyone) else None
