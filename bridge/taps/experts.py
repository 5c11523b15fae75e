"""Expert taps: activations inside a mixture of experts whose weights share one parameter.

Only layers with listeners compute one expert after the other, in the model's own forward. All
others keep the implementation that the model was loaded with (a grouped matrix multiplication, in
which experts are not separate).
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
from adapters.observe.observe import CHOICES, LINEAR_PRODUCTS, Function
from adapters.views import Args, Kwargs
from bridge.modules import with_element
from bridge.sharing import SharedExperts
from bridge.taps.taps import CallWatch, RunCall, TappedCall

#: The functions that add a bias to a product.
SUMS = {torch.add, Tensor.add, Tensor.__add__}


class ExpertsWatch(CallWatch):
    """A watch on one call of experts whose own forward runs each expert's two projections in turn:
    `gate_up_proj` (or `up_proj`, without a gate) and `down_proj`.

    Its channels are ``{expert}.in`` and ``{expert}.out``, the expert's input and output, ``[row,
    d_model]``, and ``{expert}.gate``, ``{expert}.pre`` and ``{expert}.post``, ``[row, d_expert]``.
    There is a row for each token that was routed to the expert, in HookedTransformer's order (by
    rank among the token's experts, then by position). An expert without tokens has no rows.
    """

    def __init__(self, shown: RunCall) -> None:
        super().__init__(shown)
        self._tap = shown.tap
        self._ran: set[int] = set()
        self._first, self._stacked = first_projection(shown.module), stacked(shown.module)
        self._inputs: dict[int, Tensor] = {}  # with separate projections, which share them
        self._shared = SharedExperts.of(shown.module)

    def output_of(self, run: Callable[[], Any]) -> Any:
        """Run the module's own forward, which runs the experts one by one; return its output."""
        module: Any = self.shown.module
        if self._shared is None and self._tap.own is not None:
            # A forward of another library wraps the model's own (accelerate's, which loads the
            # weights).
            config = module.config
            module.__dict__["config"] = copy.copy(config)
            module.config._experts_implementation_internal = "eager"
            try:
                output = super().output_of(run)
            finally:
                module.__dict__["config"] = config
        else:
            call, own = self.shown.call, inspect.unwrap(type(module).forward)
            numbered = nullcontext() if self._shared is None else self._shared.all_numbered()
            with numbered:
                output = super().output_of(lambda: own(module, *call.args, **call.kwargs))
        self._show_idle_experts()
        return output

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Show the inputs and outputs of the projections."""
        if func not in LINEAR_PRODUCTS and func not in SUMS:
            weight = None if self._shared is None else self._shared.taken(func, args)
            return func(*args, **kwargs) if weight is None else weight
        if self._stacked:
            return self._call_stacked(func, args, kwargs)
        _, operand = operands(args, kwargs)
        if func in LINEAR_PRODUCTS:
            args, kwargs = self._show_input(operand, args, kwargs)
        if self._shared is None:
            output = func(*args, **kwargs)
        else:
            output = self._shared.made(func, args, kwargs)
        # A projection's output is complete once its bias, if any, is added to the product.
        if (func in SUMS) != self.shown.module.has_bias:
            return output
        return self._show_output(operand, output)

    def _show_input(self, weight: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Show the input of a product with an expert's weight; return the product's arguments."""
        for name, channel in ((self._first, "in"), ("down_proj", "post")):
            expert = self._find_expert(weight, name)
            if expert is None:
                continue
            if args:
                return (self._show(expert, channel, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "input": self._show(expert, channel, kwargs["input"])}
        return args, kwargs

    def _show_output(self, operand: Any, output: Tensor) -> Tensor:
        """Show the output of a product or sum, if its last operand is an expert's."""
        module: Any = self.shown.module
        suffix = "_bias" if module.has_bias else ""
        expert = self._find_expert(operand, f"down_proj{suffix}")
        if expert is not None:
            return self._show(expert, "out", output)
        expert = self._find_expert(operand, f"{self._first}{suffix}")
        if expert is None:
            return output
        self._ran.add(expert)
        if not has_gate(module):
            return self._show(expert, "pre", output)
        gate, up = gate_and_up(module, output)
        gate = self._show(expert, "gate", gate)
        return joined(module, gate, self._show(expert, "pre", up))

    def _call_stacked(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Show the inputs and outputs of separate gate and up projections, which have the same
        input.
        """
        if func not in LINEAR_PRODUCTS:
            return func(*args, **kwargs)
        x, weight = operands(args, kwargs)
        for name, channel in (("W_gate", "gate"), ("W_in", "pre"), ("W_out", "out")):
            is_last = name == "W_out"
            expert = _index_of_expert(weight, self._stacked[name], transposed=not is_last)
            if expert is None:
                continue
            self._ran.add(expert)
            if is_last:
                x = self._show(expert, "post", x)
            elif expert in self._inputs:
                x = self._inputs[expert]
            else:
                x = self._inputs[expert] = self._show(expert, "in", x)
            return self._show(expert, channel, func(x, *args[1:], **kwargs))
        return func(*args, **kwargs)

    def _find_expert(self, weight: Any, name: str) -> int | None:
        """Return the index of the expert that a part of a parameter belongs to; None if none.

        Args:
            weight: an operand.
            name: the parameter's name.
        """
        if self._shared is not None:
            return self._shared.which(weight, name)
        return _index_of_expert(weight, getattr(self.shown.module, name))

    def _show(self, expert: int, channel: str, x: Tensor) -> Tensor:
        return self.shown.show(f"{expert}.{channel}", x)

    def _show_idle_experts(self) -> None:
        """Show experts without tokens as empty activations."""
        shown: set[str] = set()
        # One at a time: a hook may remove points, or request further ones.
        while waiting := [channel for channel in self._tap.points if channel not in shown]:
            channel = waiting[0]
            shown.add(channel)
            expert, activation = channel.split(".")
            if int(expert) in self._ran:
                continue
            x = self.shown.call.input
            size = x.shape[-1]
            if activation not in ("in", "out"):
                shared = self._tap.shared.get(channel)
                size = width(self.shown.module) // (1 if shared is None else shared.parts)
            self.shown.show(channel, x.new_empty(0, size))


def operands(args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Return the two operands of a product or a sum, whatever their keyword names."""
    first = args[0] if args else kwargs.get("input")
    if len(args) > 1:
        return first, args[1]
    for name in ("other", "weight", "mat2"):
        if name in kwargs:
            return first, kwargs[name]
    return first, None


def _index_of_expert(weight: Any, parameter: Tensor, *, transposed: bool = False) -> int | None:
    """Return the index of the expert that a part of a parameter, or of its transpose, belongs to;
    None if none.
    """
    shape = parameter.shape[:0:-1] if transposed else parameter.shape[1:]
    if not isinstance(weight, Tensor) or weight.shape != shape:
        return None
    start = weight.data_ptr() - parameter.data_ptr()
    expert = start // (parameter.stride(0) * parameter.element_size())
    return expert if 0 <= expert < len(parameter) else None


# --------------------------------------------------------------------------------------------------
# Experts whose tokens are all multiplied in one batched product.
# --------------------------------------------------------------------------------------------------


_BATCHED_PRODUCTS = {torch.bmm, Tensor.bmm}


class BatchedExpertsWatch(CallWatch):
    """A watch on one call of experts that multiplies all tokens in one product, ``[expert, row,
    d]``.

    Its channels are those of `ExpertsWatch`. Every expert has a row for every token: its input is
    the token times its weight, which is zero if the expert is not chosen.
    """

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Show the inputs and outputs of the products."""
        module: Any = self.shown.module
        if func not in _BATCHED_PRODUCTS:
            return func(*args, **kwargs)
        x, weight = operands(args, kwargs)
        if weight is module.down_proj:
            x = self._show_experts("post", x)
            return self._show_experts("out", func(x, *args[1:], **kwargs))
        if weight is not module.gate_up_proj:
            return func(*args, **kwargs)
        x = self._show_experts("in", x)
        gate, up = gate_and_up(module, func(x, *args[1:], **kwargs))
        gate = self._show_experts("gate", gate)
        return joined(module, gate, self._show_experts("pre", up))

    def _show_experts(self, activation: str, x: Any) -> Tensor:
        """Show the rows of each expert that has listeners."""
        channels = [f"{expert}.{activation}" for expert in range(len(x))]
        active = [channel for channel in channels if self.shown.active_points((channel,))]
        if not active:
            return x
        rows = list(x.unbind(0))
        for expert, channel in enumerate(channels):
            if channel in active:
                rows[expert] = self.shown.show(channel, rows[expert])
        return torch.stack(rows)


# --------------------------------------------------------------------------------------------------
# The steps by which a router selects experts.
# --------------------------------------------------------------------------------------------------


class RouterWatch(CallWatch):
    """A watch on one call of a router that selects experts by logits.

    Its channels are ``product``, the output of its matrix; ``logits``, by which the experts are
    chosen; and ``weights``, the factors of their outputs (zero for experts that are not chosen),
    for routers that return the weights and indices of the chosen experts: all ``[row, n_experts]``;
    and ``indices`` of the chosen experts, for routers that return none.
    """

    def __init__(self, shown: TappedCall) -> None:
        super().__init__(shown)
        self._multiplied = self._chosen = False
        self._n_experts = 0

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a torch function of the router; show its first product and its first top-k."""
        if func in LINEAR_PRODUCTS and not self._multiplied:
            self._multiplied = True
            product = func(*args, **kwargs)
            self._n_experts = product.shape[-1]
            return self.shown.show("product", product)
        if self._chosen or func not in CHOICES:
            return func(*args, **kwargs)
        self._chosen = True
        logits = self.shown.show("logits", args[0] if args else kwargs.pop("input"))
        best = func(logits, *args[1:], **kwargs)
        chosen = best.indices
        indices = self.shown.show("indices", chosen)
        if indices is chosen:
            return best
        return torch.return_types.topk((logits.gather(-1, indices), indices))

    def output_of(self, run: Callable[[], Any]) -> Any:
        """Return the router's output, with the expert weights computed from those of all experts.

        Args:
            run: its forward.
        """
        output = super().output_of(run)
        if not self.shown.active_points(("weights",)):
            return output
        pairs: list[tuple[int, int, int]] = []
        for indices_place, indices in enumerate(output):
            if indices.is_floating_point():
                continue
            for place, x in enumerate(output):
                if x.is_floating_point() and x.shape == indices.shape:
                    pairs.append((abs(place - indices_place), place, indices_place))
        if not pairs:
            raise RuntimeError(
                f"{type(self.shown.module).__name__} returns no weights and indices of chosen"
                " experts"
            )
        _, weights_place, indices_place = min(pairs)  # weights and indices are next to each other
        weights, indices = output[weights_place], output[indices_place]
        zeros = weights.new_zeros(*weights.shape[:-1], self._n_experts)
        of_all_experts = zeros.scatter(-1, indices, weights)
        shown = self.shown.show("weights", of_all_experts).gather(-1, indices)
        return with_element(output, weights_place, shown)
