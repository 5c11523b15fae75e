"""Reaching the activations inside the experts of a mixture, which keep their weights in one parameter for all.

Only the layers that someone listens to compute one expert after the other, by the model's own forward; all others
keep the implementation that the model was loaded with (a grouped multiplication, in which no expert stands alone).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from adapters.feed_forward import first_projection, gate_and_up, has_gate, joined, stacked, width
from adapters.observe.observe import CHOICES, LINEAR_PRODUCTS
from adapters.views import Args, Kwargs
from bridge.hooks.modules import with_element
from bridge.sharing import SharedExperts
from bridge.taps.taps import CallWatch, RunCall, TappedCall

#: What adds a bias to a product.
SUMS = {torch.add, Tensor.add, Tensor.__add__}


class ExpertsWatch(CallWatch):
    """Shows what one call of experts computes whose own forward runs each one's two projections, `gate_up_proj` (or
    `up_proj`, where there is no gate) and `down_proj`, in turn.

    Its channels are ``{expert}.in`` and ``{expert}.out``, what the expert is given and returns, ``[row, d_model]``, and
    ``{expert}.gate``, ``{expert}.pre`` and ``{expert}.post``, ``[row, d_expert]``. There is a row for each token that
    was sent to the expert, in the order of HookedTransformer (by rank among the token's experts, then by position). An
    expert that no token was sent to has no rows.
    """

    def __init__(self, shown: RunCall) -> None:
        super().__init__(shown)
        self._tap = shown.tap
        self._ran: set[int] = set()
        self._first, self._stacked = first_projection(shown.module), stacked(shown.module)
        self._given: dict[int, Tensor] = {}
        self._shared = SharedExperts.of(shown.module)

    def output_of(self, run: Callable[[], Any]) -> Any:
        """What the module's own forward returns, which runs the experts one by one."""
        module: Any = self.shown.module
        if self._shared is None and self._tap.own is not None:
            # Someone else's forward wraps the model's own (accelerate's, which brings the weights).
            config = module.config
            module.__dict__["config"] = copy.copy(config)
            module.config._experts_implementation_internal = "eager"
            try:
                output = super().output_of(run)
            finally:
                module.__dict__["config"] = config
        else:
            call, own = self.shown.call, inspect.unwrap(type(module).forward)
            with nullcontext() if self._shared is None else self._shared.all_numbered():
                output = super().output_of(lambda: own(module, *call.args, **call.kwargs))
        self._show_idle_experts()
        return output

    def call(self, func: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
        """Shows what enters and leaves the projections."""
        if func not in LINEAR_PRODUCTS and func not in SUMS:
            part = None if self._shared is None else self._shared.taken(func, args)
            return func(*args, **kwargs) if part is None else part
        x, other = operands(args, kwargs)
        module: Any = self.shown.module
        if self._stacked:
            return self._of_stacked(func, x, other, args, kwargs)
        if func in LINEAR_PRODUCTS:
            for weight, channel in ((self._first, "in"), ("down_proj", "post")):
                expert = self.which(other, weight)
                if expert is not None:
                    x = self._show(expert, channel, x)
                    args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})
        made = self._made(func, args, kwargs)
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
        if self._shared is not None:
            return self._shared.which(weight, name)
        return _which(weight, getattr(self.shown.module, name))

    def _made(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        return func(*args, **kwargs) if self._shared is None else self._shared.made(func, args, kwargs)

    def _show(self, expert: int, channel: str, x: Tensor) -> Tensor:
        return self.shown.show(f"{expert}.{channel}", x)

    def _show_idle_experts(self) -> None:
        """Shows the experts that did not run, without rows."""
        module: Any = self.shown.module
        shown: set[str] = set()
        # One after the other: a hook may let go of points, or ask for further ones.
        while waiting := [channel for channel in self._tap.points if channel not in shown]:
            channel = waiting[0]
            shown.add(channel)
            expert, part = channel.split(".")
            if int(expert) not in self._ran:
                shared = self._tap.shared.get(channel)
                neurons = width(module) // (1 if shared is None else shared.parts)
                given = self.shown.call.input
                size = given.shape[-1] if part in ("in", "out") else neurons
                self.shown.show(channel, given.new_empty(0, size))


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


# ----------------------------------------------------------------------------------------------------------------------
# Experts whose tokens are all multiplied in one product.
# ----------------------------------------------------------------------------------------------------------------------


_BATCHED_PRODUCTS = {torch.bmm, Tensor.bmm}


class BatchedExpertsWatch(CallWatch):
    """Shows what one call of experts computes that multiplies the tokens of all in one product, ``[expert, row, d]``.

    Its channels are those of `ExpertsWatch`. Every expert has a row for every token: its input is the token times
    its weight, which is zero where it is not chosen.
    """

    def call(self, func: Callable[..., Any], args: tuple[object, ...], kwargs: Kwargs) -> Any:
        """Shows what enters and leaves the products."""
        module: Any = self.shown.module
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
        active = [e for e in range(len(x)) if self.shown.active_points((f"{e}.{part}",))]
        if not active:
            return x
        rows = list(x.unbind(0))
        for e in active:
            rows[e] = self.shown.show(f"{e}.{part}", rows[e])
        return torch.stack(rows)


# ----------------------------------------------------------------------------------------------------------------------
# The steps by which a router chooses experts.
# ----------------------------------------------------------------------------------------------------------------------


class RouterWatch(CallWatch):
    """Shows what one call of a router computes that chooses experts by logits.

    Its channels are ``product``, what its matrix makes of its input, ``logits``, what the experts are chosen by, and
    ``weights``, what their outputs are multiplied with (zero for those that are not chosen), for routers that return
    the weights and indices of the chosen ones: all ``[row, n_experts]``; and ``indices``, those of the chosen ones, for
    routers that do not return them.
    """

    def __init__(self, shown: TappedCall) -> None:
        super().__init__(shown)
        self._multiplied = self._chosen = False
        self._n_experts = 0

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a torch function of the router's: the first product and the first choice of the best are shown."""
        if func in LINEAR_PRODUCTS and not self._multiplied:
            self._multiplied = True
            made = func(*args, **kwargs)
            self._n_experts = made.shape[-1]
            return self.shown.show("product", made)
        if self._chosen or func not in CHOICES:
            return func(*args, **kwargs)
        self._chosen = True
        given = args[0] if args else kwargs.pop("input")
        logits = self.shown.show("logits", given)
        best = func(logits, *args[1:], **kwargs)
        chosen = best.indices
        indices = self.shown.show("indices", chosen)
        return best if indices is chosen else torch.return_types.topk((logits.gather(-1, indices), indices))

    def output_of(self, run: Callable[[], Any]) -> Any:
        """What the router returns, with the weights that are made of those of all experts.

        Args:
            run: its forward.
        """
        output = super().output_of(run)
        if not self.shown.active_points(("weights",)):
            return output
        whole = [place for place, x in enumerate(output) if not x.is_floating_point()]
        of_chosen = [(abs(place - at), place, at) for at in whole for place, x in enumerate(output)
                     if place not in whole and x.shape == output[at].shape]  # fmt: skip
        if not of_chosen:
            raise RuntimeError(f"{type(self.shown.module).__name__} returns no weights and indices of chosen experts")
        _, place, at = min(of_chosen)  # they are given together
        indices = output[at]
        chosen = output[place]
        everyone = chosen.new_zeros(*chosen.shape[:-1], self._n_experts).scatter(-1, indices, chosen)
        shown = self.shown.show("weights", everyone).gather(-1, indices)
        return with_element(output, place, shown)
