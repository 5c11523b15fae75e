"""Inside a mixer: its convolution, what its recurrence is given and returns, and the states it goes through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu

from adapters.mixers.functions import FUNCTIONS, ONE_STEP, FunctionTensor
from adapters.mixers.part import functions_of
from adapters.views import Args, Call, Kwargs
from bridge.hooks.context import CURRENT, ForwardPass
from bridge.taps.patched_functions import PatchedFunction, calling_instead
from bridge.taps.states import RECURRENCES, states_of, with_states
from bridge.taps.tap import Tap


class RecurrenceTap(Tap):
    """For mixers that call functions of `adapters.mixers.functions`. Its channels are theirs, and ``state``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.namespace: MutableMapping[str, Any] = inspect.unwrap(type(module).forward).__globals__
        self._uninstalling: list[Callable[[], object]] = []

    def _install(self) -> None:
        names = functions_of(self.module)
        self._uninstalling = [PatchedFunction.install(self.namespace, name).uninstalled_with(self) for name in names]
        super()._install()

    def _uninstall(self) -> None:
        super()._uninstall()
        while self._uninstalling:
            self._uninstalling.pop()()

    def watched(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward when somebody listens."""
        call = _MixerCall(self, Call(self.module, args, kwargs))
        with calling_instead(call.instead):
            output = self.original(*args, **kwargs)
        call.check()
        return output


class _MixerCall:
    """Shows what one call of a mixer computes.

    Args:
        tap: whose hook points it is shown to.
        call: the call.
    """

    def __init__(self, tap: RecurrenceTap, call: Call) -> None:
        self._tap, self._call = tap, call
        self._run: ForwardPass | None = CURRENT.get().run
        self._length = call.input.shape[1]
        self._seen: set[str] = set()

    def instead(self, own: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
        """What is called in place of a function of the mixer's."""
        if CURRENT.get().run is not self._run:
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
            if seen.gate is not None and self._tap.active_points((seen.channel,)):
                gate: Tensor | None = given.arguments.pop(seen.gate, None)
                return gate
        return None

    def _show(self, seen: FunctionTensor, x: Tensor) -> Tensor:
        """Shows an argument or a result, and returns what is made of it."""
        self._seen.add(seen.channel)
        if not self._tap.active_points((seen.channel,)):
            return x
        same = seen.axes.endswith(" _")
        axes = seen.axes.removesuffix(" _")
        whole = rearrange(x[..., 0] if same else x, f"{axes} -> {seen.shown}")
        past = whole.shape[1] - self._length  # of a convolution that is given the last positions of a past
        shown = whole[:, past:]
        new = self._tap.show(seen.channel, shown, self._call)
        if new is shown:
            return x
        new = torch.cat([whole[:, :past], new], dim=1) if past else new
        back = rearrange(new, f"{seen.shown} -> {axes}")
        return back.unsqueeze(-1).expand_as(x) if same else back

    def _through_states(self, own: Callable[..., Any], name: str, given: inspect.BoundArguments) -> Any:
        """What the function returns; with other states, where somebody changes them."""
        if name not in RECURRENCES or not self._tap.active_points(("state",)):
            return own(*given.args, **given.kwargs)
        self._refuse_gradients()
        self._seen.add("state")
        one = self._tap.namespace[ONE_STEP.get(name, name)]
        one = one.own if isinstance(one, PatchedFunction) else one
        arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
        arguments.pop("kwargs", None)
        recurrence = RECURRENCES[name](arguments, one)
        before = states_of(recurrence)
        new = self._tap.show("state", before, self._call)
        return own(*given.args, **given.kwargs) if new is before else with_states(recurrence, before, new)

    def _refuse_gradients(self) -> None:
        for point in self._tap.active_points(("state",)):
            if any(listener.kind in ("bwd", "edge") for listener in point.visible_listeners()):
                raise RuntimeError(
                    f"{point.name} has no gradient: the model's output does not go through these states but through "
                    "a function of the whole sequence. hook_recurrence_out, hook_x and hook_log_decay have theirs"
                )

    def check(self) -> None:
        """Looks whether everything was seen that somebody listens to.

        Raises:
            RuntimeError: it was not.
        """
        missed = [channel for channel in self._tap.points if channel not in self._seen]
        points = self._tap.active_points(missed)
        if points:
            names = ", ".join(point.name for point in points)
            raise RuntimeError(
                f"{type(self._tap.module).__name__} ran without the functions in which {names} can be seen "
                "(a fused kernel did it all): use model.eval(), or load the model without kernels"
            )
