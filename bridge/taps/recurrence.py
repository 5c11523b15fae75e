"""Mixer taps: the convolution, the inputs and outputs of the recurrence, and its states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu

from adapters.mixers import FUNCTIONS, ONE_STEP, FunctionTensor, functions_of
from adapters.observe.observe import Function
from adapters.views import Args, Kwargs
from bridge.hooks.context import setting
from bridge.taps.taps import INSTEAD, CallWatch, PatchedFunction, RunCall

# --------------------------------------------------------------------------------------------------
# The states of a mixer's recurrence, position by position, from the model's own single-step
# function.
#
# The functions for a whole sequence keep no state for each position (they work in chunks, or in a
# kernel). Each has a single-step counterpart, with which the model generates. Run at each position,
# it gives every state; with an empty update, it reads the output from a state.
# --------------------------------------------------------------------------------------------------


StepFunction = Callable[..., Any]


class _Recurrence:
    """One call of a recurrence, split into steps.

    Args:
        arguments: the function's arguments.
        single_step: the function that computes one step.
        length: the number of steps.
    """

    def __init__(self, arguments: Kwargs, single_step: StepFunction, length: int) -> None:
        self.arguments, self.single_step, self.length = arguments, single_step, length

    def first(self) -> Tensor | None:
        """Return the state before the first position."""
        raise NotImplementedError

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        """Return the output at a position and the next state; ``idle`` reads the state and keeps
        it.
        """
        raise NotImplementedError

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        """Return the function's result for these outputs and this last state."""
        raise NotImplementedError


class _DeltaRule(_Recurrence):
    """A gated delta rule over a sequence or a single step: both functions take sequences."""

    _OF_POSITIONS = ("query", "key", "value", "g", "beta")

    def __init__(self, arguments: Kwargs, single_step: StepFunction) -> None:
        super().__init__(arguments, single_step, arguments["query"].shape[1])
        self._rest = dict(arguments)
        for name in (*self._OF_POSITIONS, "chunk_size", "kwargs"):
            self._rest.pop(name, None)
        self._rest["output_final_state"] = True

    def first(self) -> Tensor | None:
        state: Tensor | None = self.arguments.get("initial_state")
        return state

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        arguments = self._rest | {"initial_state": state}
        for name in self._OF_POSITIONS:
            arguments[name] = self.arguments[name][:, t : t + 1]
        if idle:
            for name in ("g", "beta"):
                arguments[name] = torch.zeros_like(arguments[name])
        output, last = self.single_step(**arguments)
        return output, last

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        last = state if self.arguments.get("output_final_state") else None
        return torch.cat(outputs, dim=1), last


class _SelectiveScan(_Recurrence):
    """Mamba's scan over a sequence, `mamba_selective_scan`, computed step by step with
    `mamba_selective_state_update`."""

    def __init__(self, arguments: Kwargs, single_step: StepFunction) -> None:
        super().__init__(arguments, single_step, arguments["hidden_states"].shape[-1])

    def first(self) -> Tensor:
        x, A = self.arguments["hidden_states"], self.arguments["A"]
        return torch.zeros(*x.shape[:2], A.shape[-1], dtype=torch.float32, device=x.device)

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        assert state is not None
        state = state.clone()
        arguments = self.arguments
        x, dt, B, C = (arguments[name][..., t] for name in ("hidden_states", "dt", "B", "C"))
        A, D, z = arguments["A"], arguments.get("D"), arguments.get("z")
        if z is not None:
            z = z[..., t]
        if idle:
            dt, options = torch.zeros_like(dt), {}
        else:
            softplus = arguments.get("delta_softplus", False)
            options = {"dt_bias": arguments.get("delta_bias"), "dt_softplus": softplus}
        return self.single_step(state, x, dt, A, B, C, D, z=z, **options), state

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        output = torch.stack(outputs, dim=-1)
        return (output, state) if self.arguments.get("return_last_state") else output


class _ChunkScan(_Recurrence):
    """Mamba 2's scan over a sequence, `mamba2_chunk_scan`, computed step by step with
    `mamba2_selective_state_update`."""

    def __init__(self, arguments: Kwargs, single_step: StepFunction) -> None:
        no_limit = (0.0, float("inf"))
        least, most = arguments.get("dt_limit", no_limit)
        if (least, most) != no_limit:
            # The single-step function has no limit: it is applied to the final time step here.
            dt, bias = arguments["dt"], arguments.get("dt_bias")
            if bias is not None:
                dt = dt + bias.to(dt.dtype)
            if arguments.get("dt_softplus"):
                dt = torch.nn.functional.softplus(dt)
            dt = dt.clamp(least, most)
            arguments = arguments | {"dt": dt, "dt_bias": None, "dt_softplus": False}
        super().__init__(arguments, single_step, arguments["hidden_states"].shape[1])

    def first(self) -> Tensor:
        initial: Tensor | None = self.arguments.get("initial_states")
        if initial is not None:
            return initial
        x, B = self.arguments["hidden_states"], self.arguments["B"]
        shape = (x.shape[0], *x.shape[2:], B.shape[-1])
        return torch.zeros(shape, dtype=torch.float32, device=x.device)

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        assert state is not None
        state = state.clone()
        arguments = self.arguments
        x, dt, B, C = (arguments[name][:, t] for name in ("hidden_states", "dt", "B", "C"))
        width = x.shape[-1]

        def wide(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[..., None].expand(*x.shape, width)

        A = arguments["A"][:, None, None].expand(-1, width, state.shape[-1])
        D, z = wide(arguments.get("D")), arguments.get("z")
        if idle:
            dt, options = torch.zeros_like(dt), {}
        else:
            softplus = arguments.get("dt_softplus", False)
            options = {"dt_bias": wide(arguments.get("dt_bias")), "dt_softplus": softplus}
        return self.single_step(state, x, wide(dt), A, B, C, D, z=z, **options), state

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        output = torch.stack(outputs, dim=1)
        return (output, state) if self.arguments.get("return_final_states") else output


class _OneUpdate(_Recurrence):
    """A single step of Mamba or Mamba 2, which overwrites the old state with the new one."""

    def __init__(self, arguments: Kwargs, single_step: StepFunction) -> None:
        super().__init__(arguments, single_step, 1)

    def first(self) -> Tensor:
        state: Tensor = self.arguments["state"]
        return state

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        assert state is not None
        state = state.clone()
        arguments = self.arguments | {"state": state}
        if idle:
            dt = torch.zeros_like(arguments["dt"])
            arguments |= {"dt": dt, "dt_bias": None, "dt_softplus": False}
        return self.single_step(**arguments), state

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        self.arguments["state"].copy_(state)
        return outputs[0]


#: The decomposition of each function that holds a recurrence.
RECURRENCES: dict[str, Callable[[Kwargs, StepFunction], _Recurrence]] = {
    "mamba_selective_scan": _SelectiveScan,
    "mamba_selective_state_update": _OneUpdate,
    "mamba2_chunk_scan": _ChunkScan,
    "mamba2_selective_state_update": _OneUpdate,
    "torch_chunk_gated_delta_rule": _DeltaRule,
    "torch_recurrent_gated_delta_rule": _DeltaRule,
    "chunk_kimi_delta_attention": _DeltaRule,
    "recurrent_kimi_delta_attention": _DeltaRule,
}


def states_of(recurrence: _Recurrence) -> Tensor:
    """Return every state, ``[batch, pos, ...]``."""
    state, states = recurrence.first(), []
    for t in range(recurrence.length):
        _, state = recurrence.step(t, state)
        states.append(state)
    return torch.stack(states, dim=1)


def replace_states(recurrence: _Recurrence, before: Tensor, new: Tensor) -> Any:
    """Return the function's result with changed states; later states are computed from them.

    Args:
        recurrence: the call.
        before: its states, ``[batch, pos, ...]``.
        new: the new states. Only changed ones are replaced; later states are computed from them.
    """
    state, outputs = recurrence.first(), []
    changed = new != before
    for t in range(recurrence.length):
        output, after = recurrence.step(t, state)
        if bool(changed[:, t].any()):
            after = torch.where(changed[:, t], new[:, t].to(after.dtype), after)
            output, _ = recurrence.step(t, after, idle=True)
        outputs.append(output)
        state = after
    assert state is not None
    return recurrence.returned(outputs, state)


def _namespace(module: nn.Module) -> MutableMapping[str, Any]:
    """Return the namespace in which a mixer's forward looks up its functions."""
    namespace: MutableMapping[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return namespace


class MixerWatch(CallWatch):
    """A watch on one call of a mixer, called in place of the functions of `adapters.mixers`.

    Its channels are those of the functions, and ``state``.
    """

    def __init__(self, shown: RunCall) -> None:
        super().__init__(shown)
        self._points, self._length = shown.tap.points, shown.call.input.shape[1]
        self._seen: set[str] = set()

    @staticmethod
    def functions(module: nn.Module) -> Iterable[tuple[MutableMapping[str, Any], str]]:
        """Return the functions that a mixer calls."""
        return [(_namespace(module), name) for name in functions_of(module)]

    def output_of(self, run: Callable[[], Any]) -> Any:
        """Run the mixer, and check that everything that has listeners was seen."""
        with setting(INSTEAD, self.instead):
            output = run()
        self._check()
        return output

    def instead(self, own: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Run in place of a function of the mixer, and show its arguments and results."""
        if self.in_user_function:
            return own(*args, **kwargs)
        bound = inspect.signature(own).bind(*args, **kwargs)
        for tensor in FUNCTIONS[name]:
            if tensor.parameter is not None:
                argument = bound.arguments[tensor.parameter]
                bound.arguments[tensor.parameter] = self._show(tensor, argument)
        gate = self._take_gate(name, bound)
        returned = self._through_states(own, name, bound)
        for tensor in FUNCTIONS[name]:
            if tensor.parameter is not None:
                continue
            if isinstance(returned, tuple):
                returned = (self._show(tensor, returned[0]), *returned[1:])
            else:
                returned = self._show(tensor, returned)
        return returned if gate is None else returned * silu(gate)

    def _take_gate(self, name: str, bound: inspect.BoundArguments) -> Tensor | None:
        """Remove and return the gate of a function whose activation is shown before the gate."""
        for tensor in FUNCTIONS[name]:
            if tensor.gate is not None and self.shown.active_points((tensor.channel,)):
                gate: Tensor | None = bound.arguments.pop(tensor.gate, None)
                return gate
        return None

    def _show(self, tensor: FunctionTensor, x: Tensor) -> Tensor:
        """Show an argument or a result, and return the listeners' result."""
        self._seen.add(tensor.channel)
        if not self.shown.active_points((tensor.channel,)):
            return x
        repeated = tensor.axes.endswith(" _")  # along the last axis
        axes = tensor.axes.removesuffix(" _")
        canonical = rearrange(x[..., 0] if repeated else x, f"{axes} -> {tensor.shown}")
        # A convolution's input may begin with the last positions of the past.
        past = canonical.shape[1] - self._length
        shown = canonical[:, past:]
        new = self.shown.show(tensor.channel, shown)
        if new is shown:
            return x
        if past:
            new = torch.cat([canonical[:, :past], new], dim=1)
        result = rearrange(new, f"{tensor.shown} -> {axes}")
        return result.unsqueeze(-1).expand_as(x) if repeated else result

    def _through_states(self, own: Function, name: str, bound: inspect.BoundArguments) -> Any:
        """Return the function's result, recomputed if listeners change states."""
        if name not in RECURRENCES or not self.shown.active_points(("state",)):
            return own(*bound.args, **bound.kwargs)
        self._refuse_gradients()
        self._seen.add("state")
        single_step = _namespace(self.shown.module)[ONE_STEP.get(name, name)]
        if isinstance(single_step, PatchedFunction):
            single_step = single_step.own
        arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        arguments.pop("kwargs", None)
        recurrence = RECURRENCES[name](arguments, single_step)
        before = states_of(recurrence)
        new = self.shown.show("state", before)
        if new is before:
            return own(*bound.args, **bound.kwargs)
        return replace_states(recurrence, before, new)

    def _refuse_gradients(self) -> None:
        for point in self.shown.active_points(("state",)):
            if any(listener.kind in ("bwd", "edge") for listener in point.visible_listeners()):
                raise RuntimeError(
                    f"{point.name} has no gradient: the model's output does not go through these"
                    " states but through a function of the whole sequence. hook_recurrence_out,"
                    " hook_x and hook_log_decay have theirs"
                )

    def _check(self) -> None:
        """Check that everything that has listeners was seen.

        Raises:
            RuntimeError: something was not.
        """
        missed = [channel for channel in self._points if channel not in self._seen]
        points = self.shown.active_points(missed)
        if points:
            names = ", ".join(point.name for point in points)
            raise RuntimeError(
                f"{type(self.shown.module).__name__} ran without the functions in which {names} can"
                " be seen (a fused kernel did it all): use model.eval(), or load the model without"
                " kernels"
            )
