"""`Trace`: one forward pass that runs in step with the body of a ``with`` statement.

Input: a run, and a body of ordinary Python that reads activations by name,
``run["blocks.3.hook_resid_post"]``. The body is given the activations themselves, not proxies: it
may print them, branch and compute on them, and the model continues with what it writes. Output: the
result of the run, when the block ends.

1. *Begin* (`InStep.__enter__`). The pass is prepared, and invalid requests raise an error. The
   model does not run yet.
2. *Request* (`Trace.__getitem__` -> `Stops.reach`). A listener is attached at the requested place,
   and the model's side, a greenlet, runs on until it arrives there (`bridge.trace.coroutine`). Both
   sides take turns on one thread, each with its own context variables and torch modes.
3. *Stop.* The listener gives the body a copy, and waits. At the body's next request, or at the end
   of its block, the edited copy replaces the activation, by the rules of any hook.
4. *End* (`InStep.__exit__`). The model runs to its end, or is abandoned if the body raised. All
   listeners are detached.

Requests must follow the model's order: what it has passed is no longer available, and the error
says where it was and where the body asked (`bridge.trace.stops`). A generation is traced likewise,
step by step (`bridge.trace.generation`), and a body can be converted into hooks that need no trace
(`bridge.trace.edit`).

Errors: a second use of one trace, points in layers that do not run, blocks that backward
recomputes. This file does not depend on taps and torch hooks, except for what `Wiring` opens for
hooks that are added while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn

from adapters.imports import is_checkpointed
from adapters.inputs import takes
from adapters.points import module_at
from bridge.hooks.context import CURRENT, ForwardPass, Generation, OpenTrace, Scope, closed, opened
from bridge.hooks.hooks import HookPoint
from bridge.run.inputs import Inputs, Request, RunnableBridge, check_arguments
from bridge.run.layer_range import GivenOutput, bypassing
from bridge.run.run import PreparedPass, checked_layers, points_that_run, refuse_unreached_points
from bridge.trace.access import Access
from bridge.trace.coroutine import Coroutine, OutOfStepError
from bridge.trace.edit import BodyActivations
from bridge.trace.stops import ModelOrder, PointPart, Stop, Stops, Target

_OURS = (
    "prepend_bos",
    "padding_side",
    "attention_mask",
    "start_at_layer",
    "stop_at_layer",
    "capture",
)


_NOT_BEGUN = "the trace has not begun: with bridge.trace(prompt) as run: ..."


class InStep:
    """A traced run or generation, in which the model and the body take turns.

    Args:
        bridge: the bridge.
        places: the order of its hook points.
        captured: hook points whose activations are kept whenever they run.

    Attributes:
        scope: a scope that only its runs see.
        stops: the places where the run pauses.
    """

    #: Why it cannot be entered twice.
    once: str

    def __init__(
        self, bridge: RunnableBridge, places: ModelOrder, captured: Sequence[HookPoint] = ()
    ) -> None:
        self.scope = Scope(of_one_run=True)
        self.stops = Stops(bridge.wiring, self.scope, places, captured)
        self._stack: ExitStack | None = None
        self._shown: OpenTrace | None = None
        self._state: Literal["new", "open", "ran", "stopped"] = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError(self.once)
        self._state = "open"
        coroutine = self.stops.coroutine = Coroutine(self._work)
        try:
            self._begin(coroutine)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._run_to_the_end()
                self.stops.late_edits.check()
        finally:
            self._end()
        if error is not None:
            explain(error, traceback)

    def _begin(self, coroutine: Coroutine) -> None:
        """Prepare what the body needs."""
        raise NotImplementedError

    def _work(self) -> None:
        """Run the model's side."""
        raise NotImplementedError

    def _show(self, names: object, trace: OpenTrace) -> None:
        """Make the bridge's parts show the trace's activations until the block ends."""
        opened(names, trace)
        self._shown = trace

    def _until_the_end(self) -> ExitStack:
        """Return the context that is closed when the block ends."""
        if self._stack is None:
            self._stack = ExitStack()
        return self._stack

    def _run_to_the_end(self) -> None:
        """Run the model to its end, if the block is still open."""
        if self._state != "open":
            return
        assert self.stops.coroutine is not None
        while not self.stops.coroutine.finished:
            self.stops.resume()

    def _end(self) -> None:
        """Abandon the run, and detach the listeners."""
        try:
            if self.stops.coroutine is not None and not self.stops.coroutine.finished:
                self.stops.coroutine.abandon()
        finally:
            self.stops.detach()
            self.stops.late_edits.forget()
            shown, self._shown = self._shown, None  # it may be this very object
            if shown is not None:
                closed(shown)
            if self._stack is not None:
                self._stack.close()
            if self._state == "open":
                self._state = "stopped"


def explain(error: BaseException, traceback: TracebackType | None) -> None:
    """Cut the traceback of our own errors at the user's line, and add a note about `save`."""
    if isinstance(error, AttributeError) and error.name == "save":
        error.add_note(
            "Values of a trace are real, and stay: there is nothing to save. bridge.save(x) is"
            " there for code that has it, and returns x."
        )
    if isinstance(error, OutOfStepError) and traceback is not None:
        traceback.tb_next = None


class Trace(InStep, Access):
    """A run of the model that pauses where the body of a ``with`` statement reads an activation.

    Args:
        bridge: the bridge.
        places: the order of its hook points.
        request: the request for the run.
        capture: hook points whose activations can be read in any order, and after the block.
    """

    def __init__(
        self,
        bridge: RunnableBridge,
        places: ModelOrder,
        request: Request,
        capture: Sequence[str],
    ) -> None:
        check_arguments(bridge, request, _OURS)
        self._layers = checked_layers(bridge, request.start_at_layer, request.stop_at_layer)
        if isinstance(capture, str):
            raise TypeError(f"capture is {capture!r}; it must be a list of names")
        kept = [bridge.names.find(name) for name in capture]
        InStep.__init__(self, bridge, places, kept)
        Access.__init__(self, bridge, self.stops)
        for hook in kept:
            self._check_runs(hook)
        self._pass: PreparedPass | None = PreparedPass(
            bridge, request, *self._layers, True, self.scope
        )
        self._is_ready = False
        self._output: Any = None
        self._inputs: Inputs | None = None
        self._left_out: dict[str, GivenOutput] = {}

    # The block.

    once = "a trace is one run: make a new one for the next (with bridge.trace(prompt) as run: ...)"

    def _begin(self, coroutine: Coroutine) -> None:
        refuse_checkpointing(self.bridge)
        self._begun_in = CURRENT.get()
        if self.stops.captured:
            self.stops.listen_to_captured()
        assert self._pass is not None
        # This raises the errors of invalid requests.
        self._inputs = coroutine.run_in_context(self._pass.__enter__).inputs
        self._is_ready = True
        self._show(self.bridge.names, self)

    def _work(self) -> None:
        """Run the model's side."""
        assert self._pass is not None
        try:
            self._output = self._pass.run_model()
            self._state = "ran"
        finally:
            self._close_pass()

    def _close_pass(self) -> None:
        """Close the prepared pass, once."""
        if self._is_ready:
            assert self._pass is not None
            self._is_ready = False
            self._pass.__exit__()

    def _end(self) -> None:
        try:
            super()._end()
        finally:
            if self._is_ready and self.stops.coroutine is not None:
                # The model was never called.
                self.stops.coroutine.run_in_context(self._close_pass)
            self._pass = None
            if self._inputs is not None:
                self._inputs = self._lasting_inputs(self._inputs)

    def _lasting_inputs(self, inputs: Inputs) -> Inputs:
        """Return the arguments with tokens and rows; a finished trace keeps no other argument."""
        names = ("input_ids", "inputs_embeds", "attention_mask", takes(self.bridge.core).main)
        kwargs = {name: inputs.kwargs[name] for name in names if name in inputs.kwargs}
        return Inputs(kwargs, inputs.tokens, None)

    # The inputs of the run, and its results.

    @property
    def shows(self) -> tuple[ForwardPass | None, Generation | None]:
        if self._pass is None or not self._is_ready:
            return None, None
        return self._pass.run, None

    @property
    def output(self) -> Any:
        """Return the model's output; with `stop_at_layer`, the residual stream ``[batch, pos,
        d_model]``.

        Inside the block, this runs the model to its end.

        Raises:
            RuntimeError: the run was stopped.
        """
        self._run_to_the_end()
        if self._state != "ran":
            reason = "it was stopped" if self._state == "stopped" else "it has not begun"
            raise RuntimeError(f"this run has no output: {reason}")
        return self._output

    @property
    def logits(self) -> Tensor:
        """Return the logits, ``[batch, pos, d_vocab]``. Inside the block, run the model to its end
        first.

        Raises:
            RuntimeError: the run was stopped, or stops at a layer.
        """
        output = self.output
        if self._layers[1] is not None:
            raise RuntimeError(
                f"a run with stop_at_layer={self._layers[1]} has no logits; run.output is the"
                " residual stream there"
            )
        logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
        return logits

    @property
    def tokens(self) -> Tensor | None:
        """Return the tokens of the run, ``[batch, pos]``; None for embeddings."""
        if self._inputs is None:
            return None
        reads_tokens = takes(self.bridge.core).main not in self._inputs.kwargs
        tokens: Tensor | None = (
            self._inputs.kwargs.get("input_ids") if reads_tokens else self._inputs.tokens
        )
        return tokens

    def grad(self, name: str) -> Tensor:
        """Return the gradient at a hook point that was requested, after a backward pass.

        Several backward passes accumulate, as in ``.grad``.

        Args:
            name: a name or alias.

        Raises:
            RuntimeError: there was no backward pass, the point was not requested, or it has no
                gradient.
        """
        canonical = self.bridge.names.find(name).name
        gradient = self.stops.gradients.get(canonical)
        if gradient is not None:
            return gradient
        if canonical not in self.stops.seen:
            raise RuntimeError(
                f"{canonical} has no gradient: ask for it in the block (or name it in capture),"
                " with gradients switched on and something before it that wants them"
            )
        raise RuntimeError(
            f"{canonical} has no gradient yet: call backward on something that depends on it "
            "(torch.autograd.grad gives it to you directly)"
        )

    def stop(self) -> None:
        """End the run where it is: later modules are not computed."""
        if self._state == "open":
            assert self.stops.coroutine is not None
            self.stops.coroutine.abandon()
            self._state = "stopped"

    def skip(self, first: int, last: int | None = None) -> None:
        """Skip blocks: each passes its residual stream on unchanged.

        Args:
            first: the first block to skip; a negative index counts from the end.
            last: the last block to skip, inclusive; None: only the first.

        Raises:
            ValueError: there are no such blocks; the model has already reached the first; the model
                cannot run without them; the run stops at one of them; or hook points in them are
                captured or have hooks of a `with` statement.
        """
        bridge, n = self.bridge, self.bridge.cfg.n_layers
        layers = (first, first if last is None else last)
        start, end = (layer + n if layer < 0 else layer for layer in layers)
        call = f"skip{layers}"
        if not 0 <= start <= end < n:
            raise ValueError(
                f"{call}: the model has {n} blocks, 0 to {n - 1}, and first must not be behind last"
            )
        if bridge.no_layer_runs:
            raise ValueError(f"{bridge.cfg.model_name} cannot skip blocks: {bridge.no_layer_runs}")
        self._check_skip(start, end, call)
        refuse_unreached_points(bridge, lambda d: not start <= d <= end, call, self._begun_in)
        assert self._pass is not None
        paths = bridge.block_paths[start : end + 1]
        blocks = [module_at(bridge.original_model, path) for path in paths]
        self._until_the_end().enter_context(bypassing(self._pass.run, blocks, *bridge.block_output))

    def _check_skip(self, start: int, end: int, call: str) -> None:
        """Check that blocks can be skipped now, both ends included.

        Raises:
            ValueError: see `skip`.
        """
        if self._state != "open" or self.stops.has_begun(start):
            raise ValueError(
                f"{call}: the model has come to block {start} already, or may have: say it before"
            )
        stop = self._layers[1]
        if stop is not None:
            last = min(stop, self.bridge.cfg.n_layers - 1)
            if end >= last:
                raise ValueError(f"{call}: with stop_at_layer={stop} the run ends at block {last}")
        for hook in self.stops.captured:
            if hook.point.stack and start <= hook.point.depth <= end:
                raise ValueError(f"{call}: {hook.name} is captured, and would not run")

    def leave_out(self, path: str, value: Any) -> None:
        module = module_at(self.bridge.original_model, path)
        if type(module).forward is nn.Module.forward:
            raise TypeError(
                f"{path} is a {type(module).__name__}, which the model does not call: skip what is"
                " in it"
            )
        if self._state != "open":
            raise RuntimeError(f"{path} can be skipped while the trace is open")
        for hook in self.bridge.wiring.points.values():
            inside = f"{hook.point.site.path}.".startswith(f"{path}.")
            if inside and (hook in self.stops.captured or hook.has_visible_listeners):
                raise ValueError(
                    f"{path} cannot be skipped: {hook.name}, which is captured or has a hook, is"
                    " in it"
                )
        assert self._pass is not None
        run, output = self._pass.run, GivenOutput(value)
        self._left_out[path] = output
        self._until_the_end().enter_context(bypassing(run, [module], None, 1))
        run.entering[module] = output

    def _run_to_the_end(self) -> None:
        super()._run_to_the_end()
        if self._state != "ran":
            return
        for path, output in self._left_out.items():
            if not output.used:
                raise OutOfStepError(
                    f"{path} was to be skipped, and the model did not come to it after that: say it"
                    " before"
                )

    def invoke(self, *prompts: Any, **arguments: Any) -> NoReturn:
        """Raise an error that names the equivalent of nnsight's ``tracer.invoke``.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a trace takes all its prompts at once, and one body edits each by itself: with"
            " bridge.trace([first, second]) as run: run.rows(0)[...] is the first one's part,"
            " run.rows(1)[...] the second's"
        )

    def rows(self, index: int) -> _PromptRows:
        """Return one of several prompts: its part of every activation, without padding.

        Args:
            index: the index of the prompt; a negative index counts from the end.

        Raises:
            IndexError: there is no such prompt.
            ValueError: its tokens are not contiguous.
        """
        batch, length, ranges = self._all_rows()
        if not -batch <= index < batch:
            raise IndexError(f"rows({index}): the run has {batch} prompts")
        index %= batch
        start, stop = (0, length) if ranges is None else ranges[index]
        if start < 0:
            raise ValueError(
                f"the tokens of prompt {index} have padding between them, so it is no one piece"
            )
        return _PromptRows(self, index, start, stop, length)

    def _all_rows(self) -> tuple[int, int, list[tuple[int, int]] | None]:
        """Return the number of prompts, their length, and the positions of real tokens; None: all
        positions.

        Raises:
            RuntimeError: these are not known yet.
        """
        if self._inputs is None:
            raise RuntimeError(_NOT_BEGUN)
        kwargs, main = self._inputs.kwargs, takes(self.bridge.core).main
        if main in kwargs:  # images or sound, which have no padding
            return int(kwargs[main].shape[0]), 0, None
        x = kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"]
        batch, length = int(x.shape[0]), int(x.shape[1])
        mask = kwargs.get("attention_mask")
        if mask is None or mask.ndim != 2:
            return batch, length, None
        return batch, length, [_token_range(row[-length:]) for row in mask]

    # Requests.

    def axes_of(self, name: str) -> list[str]:
        """Return the names of the axes of an activation."""
        return self.bridge.names.find(name).point.axes.split()

    def __getitem__(self, name: str) -> Tensor:
        hook = self.bridge.names.find(name)
        activation = self.stops.kept.get(hook)
        if activation is None:
            activation = self.reach(hook).value
        return activation

    def reach(self, target: Target) -> Stop:
        if not isinstance(target, tuple):
            self._check_runs(target.hook if isinstance(target, PointPart) else target)
        if self._state == "new":
            raise RuntimeError(_NOT_BEGUN)
        if self._state == "stopped":
            raise RuntimeError("the run was stopped, and the model goes no further")
        return self.stops.reach(target)

    def _check_runs(self, hook: HookPoint) -> None:
        start, stop = self._layers
        if start is None and stop is None:
            return
        layers = {"start_at_layer": start, "stop_at_layer": stop}
        if not points_that_run(self.bridge, [hook], layers):
            limits = [f"{name}={layer}" for name, layer in layers.items() if layer is not None]
            raise ValueError(f"{hook.name} does not run with {', '.join(limits)}")


def refuse_checkpointing(bridge: RunnableBridge) -> None:
    """Reject a run whose blocks backward would recompute without the body of the trace.

    Raises:
        RuntimeError: activation checkpointing is on.
    """
    if bridge.core.training and torch.is_grad_enabled() and is_checkpointed(bridge.core):
        raise RuntimeError(
            "activation checkpointing computes blocks again in backward, where nobody runs the body"
            " of a trace: use hooks (bridge.trace_edit makes them of a body), or switch it off"
        )


# --------------------------------------------------------------------------------------------------
# One prompt of several in a trace.
# --------------------------------------------------------------------------------------------------


class _PromptRows(BodyActivations):
    """The part of one prompt in every activation, as a view: the model uses changes made to it.

    Args:
        run: the trace.
        index: the index of the prompt.
        start, stop: the range of its tokens.
        length: the length of all rows.
    """

    def __init__(self, run: Trace, index: int, start: int, stop: int, length: int) -> None:
        self._run, self._index = run, index
        self._start, self._stop, self._length = start, stop, length

    def __getitem__(self, name: str) -> Tensor:
        """Return the prompt's activation, with a batch axis of one, and without padding."""
        return self._part(self._run[name], self._run.axes_of(name))

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        """Write to the prompt's activation; `value` broadcasts over the prompt's own part."""
        part = self[name]
        if value is not part:
            part[...] = value

    @property
    def logits(self) -> Tensor:
        """Return the prompt's logits, ``[1, pos, d_vocab]``."""
        return self._part(self._run.logits, ["batch", "pos", "d_vocab"])

    @property
    def tokens(self) -> Tensor | None:
        """Return the prompt's tokens, ``[1, pos]``."""
        tokens = self._run.tokens
        return None if tokens is None else self._part(tokens, ["batch", "pos"])

    def _part(self, x: Tensor, axes: list[str]) -> Tensor:
        if axes[0] != "batch":
            raise ValueError(f"an activation with the axes {' '.join(axes)} has no rows of prompts")
        rows = x[self._index : self._index + 1]
        for axis, name in enumerate(axes):
            if name in _POSITION_AXES and x.shape[axis] == self._length:
                rows = rows.narrow(axis, self._start, self._stop - self._start)
        return rows


_POSITION_AXES = ("pos", "key_pos", "encoder_pos", "encoder_key_pos")


def _token_range(mask: Tensor) -> tuple[int, int]:
    """Return the start and end of a row's tokens; (-1, -1) if they are not contiguous."""
    places = mask.nonzero().flatten().tolist()
    if not places or places[-1] - places[0] + 1 != len(places):
        return (-1, -1)
    return places[0], places[-1] + 1
