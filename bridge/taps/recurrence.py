"""Inside a mixer: its convolution, what its recurrence is given and returns, and the states it goes through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu

from adapters.mixers import FUNCTIONS, ONE_STEP, FunctionTensor, functions_of
from adapters.views import Args, Kwargs
from bridge.taps.taps import CallWatch, PatchedFunction, RunCall, calling_instead

# ----------------------------------------------------------------------------------------------------------------------
# The states of a mixer's recurrence, one position after the other, by the model's own function for one step.
#
# The functions for a whole sequence hold no state for each position (they work in chunks, or in a kernel). Beside each
# there is one for a single step, with which the model generates. Run from position to position it gives every state;
# with an update of nothing, it reads the output off a state.
# ----------------------------------------------------------------------------------------------------------------------


StepFunction = Callable[..., Any]


class Recurrence:
    """One call of a recurrence, taken apart into steps.

    Args:
        given: what the function was called with.
        one: the function that goes from step to step.
        length: how many steps there are.
    """

    def __init__(self, given: Kwargs, one: StepFunction, length: int) -> None:
        self.given, self.one, self.length = given, one, length

    def first(self) -> Tensor | None:
        """The state before the first position."""
        raise NotImplementedError

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        """The output at a position, and the state after it; ``idle`` leaves the state as it is, and reads it alone."""
        raise NotImplementedError

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        """What the function returns for these outputs and this last state."""
        raise NotImplementedError


class DeltaRule(Recurrence):
    """A gated delta rule, whole or of one step: both take sequences."""

    _OF_POSITIONS = ("query", "key", "value", "g", "beta")

    def __init__(self, given: Kwargs, one: StepFunction) -> None:
        super().__init__(given, one, given["query"].shape[1])
        self._rest = {
            name: value for name, value in given.items() if name not in (*self._OF_POSITIONS, "chunk_size", "kwargs")
        }

    def first(self) -> Tensor | None:
        state: Tensor | None = self.given.get("initial_state")
        return state

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        here = {name: self.given[name][:, t : t + 1] for name in self._OF_POSITIONS}
        if idle:
            here |= {name: torch.zeros_like(here[name]) for name in ("g", "beta")}
        rest = self._rest | {"initial_state": state, "output_final_state": True}
        output, last = self.one(**here, **rest)
        return output, last

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        return torch.cat(outputs, dim=1), state if self.given.get("output_final_state") else None


class SelectiveScan(Recurrence):
    """Mamba's scan over a sequence, `mamba_selective_scan`, by `mamba_selective_state_update`."""

    def __init__(self, given: Kwargs, one: StepFunction) -> None:
        super().__init__(given, one, given["hidden_states"].shape[-1])

    def first(self) -> Tensor:
        x, A = self.given["hidden_states"], self.given["A"]
        return torch.zeros(*x.shape[:2], A.shape[-1], dtype=torch.float32, device=x.device)

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        assert state is not None
        given, state = self.given, state.clone()
        x, dt, B, C = (given[name][..., t] for name in ("hidden_states", "dt", "B", "C"))
        z = None if given.get("z") is None else given["z"][..., t]
        options = {"dt_bias": given.get("delta_bias"), "dt_softplus": given.get("delta_softplus", False)}
        if idle:
            dt, options = torch.zeros_like(dt), {}
        return self.one(state, x, dt, given["A"], B, C, given.get("D"), z=z, **options), state

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        whole = torch.stack(outputs, dim=-1)
        return (whole, state) if self.given.get("return_last_state") else whole


class ChunkScan(Recurrence):
    """Mamba 2's scan over a sequence, `mamba2_chunk_scan`, by `mamba2_selective_state_update`."""

    def __init__(self, given: Kwargs, one: StepFunction) -> None:
        least, most = given.get("dt_limit", (0.0, float("inf")))
        if (least, most) != (0.0, float("inf")):  # which the function of one step does not know: it is given the result
            dt, bias = given["dt"], given.get("dt_bias")
            dt = dt if bias is None else dt + bias.to(dt.dtype)
            dt = torch.nn.functional.softplus(dt) if given.get("dt_softplus") else dt
            given = given | {"dt": dt.clamp(least, most), "dt_bias": None, "dt_softplus": False}
        super().__init__(given, one, given["hidden_states"].shape[1])

    def first(self) -> Tensor:
        initial: Tensor | None = self.given.get("initial_states")
        if initial is not None:
            return initial
        x, B = self.given["hidden_states"], self.given["B"]
        return torch.zeros(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32, device=x.device)

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        assert state is not None
        given, state = self.given, state.clone()
        x, dt, B, C = (given[name][:, t] for name in ("hidden_states", "dt", "B", "C"))
        width = x.shape[-1]

        def wide(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[..., None].expand(*x.shape, width)

        A = given["A"][:, None, None].expand(-1, width, state.shape[-1])
        options = {"dt_bias": wide(given.get("dt_bias")), "dt_softplus": given.get("dt_softplus", False)}
        if idle:
            dt, options = torch.zeros_like(dt), {}
        return self.one(state, x, wide(dt), A, B, C, wide(given.get("D")), z=given.get("z"), **options), state

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        whole = torch.stack(outputs, dim=1)
        return (whole, state) if self.given.get("return_final_states") else whole


class OneUpdate(Recurrence):
    """A single step of Mamba's or Mamba 2's, which writes the new state over the old one."""

    def __init__(self, given: Kwargs, one: StepFunction) -> None:
        super().__init__(given, one, 1)

    def first(self) -> Tensor:
        state: Tensor = self.given["state"]
        return state

    def step(self, t: int, state: Tensor | None, idle: bool = False) -> tuple[Tensor, Tensor]:
        assert state is not None
        given = self.given | {"state": state.clone()}
        if idle:
            given |= {"dt": torch.zeros_like(given["dt"]), "dt_bias": None, "dt_softplus": False}
        return self.one(**given), given["state"]

    def returned(self, outputs: list[Tensor], state: Tensor) -> Any:
        self.given["state"].copy_(state)
        return outputs[0]


#: How each function that holds a recurrence is taken apart.
RECURRENCES: dict[str, Callable[[Kwargs, StepFunction], Recurrence]] = {
    "mamba_selective_scan": SelectiveScan,
    "mamba_selective_state_update": OneUpdate,
    "mamba2_chunk_scan": ChunkScan,
    "mamba2_selective_state_update": OneUpdate,
    "torch_chunk_gated_delta_rule": DeltaRule,
    "torch_recurrent_gated_delta_rule": DeltaRule,
    "chunk_kimi_delta_attention": DeltaRule,
    "recurrent_kimi_delta_attention": DeltaRule,
}


def states_of(recurrence: Recurrence) -> Tensor:
    """Every state, ``[batch, pos, ...]``."""
    state, states = recurrence.first(), []
    for t in range(recurrence.length):
        _, state = recurrence.step(t, state)
        states.append(state)
    return torch.stack(states, dim=1)


def with_states(recurrence: Recurrence, before: Tensor, new: Tensor) -> Any:
    """What the function returns where some states are others: what follows them is computed from them.

    Args:
        recurrence: the call.
        before: its states, ``[batch, pos, ...]``.
        new: what they are to be. Only what differs is put in its place: the rest follows.
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
    """Where a mixer's forward looks for its functions."""
    found: MutableMapping[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return found


class MixerWatch(CallWatch):
    """Shows what one call of a mixer computes: it is called in place of the functions of `adapters.mixers`.

    Its channels are theirs, and ``state``.
    """

    def __init__(self, shown: RunCall) -> None:
        super().__init__(shown)
        self._points, self._length = shown.tap.points, shown.call.input.shape[1]
        self._seen: set[str] = set()

    @staticmethod
    def functions(module: nn.Module) -> Iterable[tuple[MutableMapping[str, Any], str]]:
        """Those that a mixer calls."""
        return [(_namespace(module), name) for name in functions_of(module)]

    def output_of(self, run: Callable[[], Any]) -> Any:
        """As `CallWatch` says, where everything was seen that somebody listens to."""
        with calling_instead(self.instead):
            output = run()
        self._check()
        return output

    def instead(self, own: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
        """What is called in place of a function of the mixer's."""
        if self.in_user_function:
            return own(*args, **kwargs)
        given = inspect.signature(own).bind(*args, **kwargs)
        for seen in FUNCTIONS[name]:
            if seen.parameter is not None:
                given.arguments[seen.parameter] = self._show(seen, given.arguments[seen.parameter])
        gate = self._gate_behind(name, given)
        returned = self._through_states(own, name, given)
        for seen in FUNCTIONS[name]:
            if seen.parameter is None:
                several = isinstance(returned, tuple)
                new = self._show(seen, returned[0] if several else returned)
                returned = (new, *returned[1:]) if several else new
        return returned if gate is None else returned * silu(gate)

    def _gate_behind(self, name: str, given: inspect.BoundArguments) -> Tensor | None:
        """The gate that a function is not to apply, since what is shown comes before it."""
        for seen in FUNCTIONS[name]:
            if seen.gate is not None and self.shown.active_points((seen.channel,)):
                gate: Tensor | None = given.arguments.pop(seen.gate, None)
                return gate
        return None

    def _show(self, seen: FunctionTensor, x: Tensor) -> Tensor:
        """Shows an argument or a result, and returns what is made of it."""
        self._seen.add(seen.channel)
        if not self.shown.active_points((seen.channel,)):
            return x
        same = seen.axes.endswith(" _")
        axes = seen.axes.removesuffix(" _")
        whole = rearrange(x[..., 0] if same else x, f"{axes} -> {seen.shown}")
        past = whole.shape[1] - self._length  # of a convolution that is given the last positions of a past
        shown = whole[:, past:]
        new = self.shown.show(seen.channel, shown)
        if new is shown:
            return x
        new = torch.cat([whole[:, :past], new], dim=1) if past else new
        back = rearrange(new, f"{seen.shown} -> {axes}")
        return back.unsqueeze(-1).expand_as(x) if same else back

    def _through_states(self, own: Callable[..., Any], name: str, given: inspect.BoundArguments) -> Any:
        """What the function returns; with other states, where somebody changes them."""
        if name not in RECURRENCES or not self.shown.active_points(("state",)):
            return own(*given.args, **given.kwargs)
        self._refuse_gradients()
        self._seen.add("state")
        one = _namespace(self.shown.module)[ONE_STEP.get(name, name)]
        one = one.own if isinstance(one, PatchedFunction) else one
        arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
        arguments.pop("kwargs", None)
        recurrence = RECURRENCES[name](arguments, one)
        before = states_of(recurrence)
        new = self.shown.show("state", before)
        return own(*given.args, **given.kwargs) if new is before else with_states(recurrence, before, new)

    def _refuse_gradients(self) -> None:
        for point in self.shown.active_points(("state",)):
            if any(listener.kind in ("bwd", "edge") for listener in point.visible_listeners()):
                raise RuntimeError(
                    f"{point.name} has no gradient: the model's output does not go through these states but through "
                    "a function of the whole sequence. hook_recurrence_out, hook_x and hook_log_decay have theirs"
                )

    def _check(self) -> None:
        """Looks whether everything was seen that somebody listens to.

        Raises:
            RuntimeError: it was not.
        """
        missed = [channel for channel in self._points if channel not in self._seen]
        points = self.shown.active_points(missed)
        if points:
            names = ", ".join(point.name for point in points)
            raise RuntimeError(
                f"{type(self.shown.module).__name__} ran without the functions in which {names} can be seen "
                "(a fused kernel did it all): use model.eval(), or load the model without kernels"
            )
