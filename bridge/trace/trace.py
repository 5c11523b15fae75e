"""`Trace`: one forward pass, in step with the body of a ``with`` statement.

What comes in is a run, and a body of ordinary Python that asks for activations by name,
``run["blocks.3.hook_resid_post"]``. What the body is given are the activations themselves, not promises of them: it
may print, branch and compute on them, and what it writes into one the model goes on with. What goes out is what the
run returns, when the block ends.

1. *Begin* (`InStep.__enter__`). The pass is made ready, and what can be refused is refused. The model does not run
   yet.
2. *Ask* (`Trace.__getitem__` -> `Stops.reach`). A listener is attached where the body asks, and the model's side, a
   greenlet, goes on until it comes there (`bridge.trace.coroutine`). Both sides take turns on one thread, each with
   the context variables and torch modes of its own.
3. *Stop.* The listener shows the body a copy, and waits. When the body asks for the next thing, or its block ends,
   what it made of the copy takes the activation's place, by the rules of any hook.
4. *End* (`InStep.__exit__`). The model runs to its end; or, where the body raised, is left where it is. All that was
   attached is taken away.

The order of asking is that of the model: what it has passed cannot be had any more, and the error says where it was
and where the body asked (`bridge.trace.stops`). A generation is traced likewise, step by step
(`bridge.trace.generation`), and a body can be made into hooks that need no trace (`bridge.trace.edit`).

Refused: a second use of one trace, points in layers that do not run, blocks that backward computes again. Not known
here: taps and torch hooks, beyond what `Wiring` offers to open for hooks that come while the model runs.
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
from bridge.interventions.operations import Index
from bridge.run.inputs import Inputs, Request, RunnableBridge, check_arguments
from bridge.run.layer_range import GivenOutput, bypassing
from bridge.run.run import PreparedPass, checked_layers, points_that_run, refuse_unreached_points
from bridge.trace.access import Access
from bridge.trace.coroutine import Coroutine, OutOfStepError
from bridge.trace.edit import BodyActivations
from bridge.trace.stops import ModelOrder, Stop, Stops

_OURS = ("prepend_bos", "padding_side", "attention_mask", "start_at_layer", "stop_at_layer", "capture")


class InStep:
    """What a traced run and a traced generation share: model and body begin, wait for each other, and end.

    Args:
        bridge: the bridge.
        places: the order of its hook points.
        captured: hook points that are kept whenever they come.

    Attributes:
        scope: what its runs alone see.
        stops: where the work waits.
    """

    #: Why it cannot be entered twice.
    once: str

    def __init__(self, bridge: RunnableBridge, places: ModelOrder, captured: Sequence[HookPoint] = ()) -> None:
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
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
        """Makes ready what the body needs."""
        raise NotImplementedError

    def _work(self) -> None:
        """The model's side."""
        raise NotImplementedError

    def _show(self, names: object, trace: OpenTrace) -> None:
        """Lets the parts of the bridge show what a trace sees, as long as the block lasts."""
        opened(names, trace)
        self._shown = trace

    def _until_the_end(self) -> ExitStack:
        """What is closed when the block ends."""
        if self._stack is None:
            self._stack = ExitStack()
        return self._stack

    def _run_to_the_end(self) -> None:
        """Lets the work end, where the block is still open."""
        if self._state != "open":
            return
        assert self.stops.coroutine is not None
        while not self.stops.coroutine.finished:
            self.stops.resume()

    def _end(self) -> None:
        """Leaves the work where it is, and takes away what was attached."""
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
    """Ends the traceback of our own errors at the user's line, and says of `save` what it is."""
    if isinstance(error, AttributeError) and error.name == "save":
        error.add_note(
            "Values of a trace are real, and stay: there is nothing to save. bridge.save(x) is there for code that "
            "has it, and returns x."
        )
    if isinstance(error, OutOfStepError) and traceback is not None:
        traceback.tb_next = None


class Trace(InStep, Access):
    """A run of the model that waits where the body of a ``with`` statement asks for something.

    Args:
        bridge: the bridge.
        places: the order of its hook points.
        asked: what is asked of the run.
        capture: hook points whose activations can be read in any order, and after the block.
    """

    def __init__(
        self,
        bridge: RunnableBridge,
        places: ModelOrder,
        asked: Request,
        capture: Sequence[str],
    ) -> None:
        check_arguments(bridge, asked, _OURS)
        self._layers = checked_layers(bridge, asked.start_at_layer, asked.stop_at_layer)
        if isinstance(capture, str):
            raise TypeError(f"capture is {capture!r}; it must be a list of names")
        kept = [bridge.names.find(name) for name in capture]
        InStep.__init__(self, bridge, places, kept)
        Access.__init__(self, bridge, self.stops)
        for hook in kept:
            self._check_runs(hook.name)
        self._pass: PreparedPass | None = PreparedPass(bridge, asked, *self._layers, True, self.scope)
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
        self._inputs = coroutine.run_in_context(self._pass.__enter__).inputs  # what can be refused is refused here
        self._is_ready = True
        self._show(self.bridge.names, self)

    def _work(self) -> None:
        """The model's side."""
        assert self._pass is not None
        try:
            self._output = self._pass.run_model()
            self._state = "ran"
        finally:
            self._after()

    def _after(self) -> None:
        """Ends what was made ready, once."""
        if self._is_ready:
            assert self._pass is not None
            self._is_ready = False
            self._pass.__exit__()

    def _end(self) -> None:
        try:
            super()._end()
        finally:
            if self._is_ready and self.stops.coroutine is not None:
                self.stops.coroutine.run_in_context(self._after)  # where the model was never called
            self._pass = None
            if self._inputs is not None:
                self._inputs = self._of_the_prompts(self._inputs)

    def _of_the_prompts(self, inputs: Inputs) -> Inputs:
        """What tokens and rows are known from: a trace that is over holds no other argument of the run."""
        names = ("input_ids", "inputs_embeds", "attention_mask", takes(self.bridge.core).main)
        return Inputs({name: inputs.kwargs[name] for name in names if name in inputs.kwargs}, inputs.tokens, None)

    # What it ran, and what came of it.

    @property
    def shows(self) -> tuple[ForwardPass | None, Generation | None]:
        return (self._pass.run if self._pass is not None and self._is_ready else None), None

    @property
    def output(self) -> Any:
        """What the model returned; with `stop_at_layer`, the residual stream ``[batch, pos, d_model]`` there.

        Asked for in the block, it lets the model run to its end.

        Raises:
            RuntimeError: the run was stopped.
        """
        self._run_to_the_end()
        if self._state != "ran":
            raise RuntimeError(
                "this run has no output: " + ("it was stopped" if self._state == "stopped" else "it has not begun")
            )
        return self._output

    @property
    def logits(self) -> Tensor:
        """The logits, ``[batch, pos, d_vocab]``. Asked for in the block, they let the model run to its end.

        Raises:
            RuntimeError: the run was stopped, or stops at a layer.
        """
        output = self.output
        if self._layers[1] is not None:
            raise RuntimeError(
                f"a run with stop_at_layer={self._layers[1]} has no logits; run.output is the residual stream there"
            )
        found: Tensor = output.logits if hasattr(output, "logits") else output[0]
        return found

    @property
    def tokens(self) -> Tensor | None:
        """The tokens that are run, ``[batch, pos]``; None for embeddings."""
        if self._inputs is None:
            return None
        reads_tokens = takes(self.bridge.core).main not in self._inputs.kwargs
        tokens: Tensor | None = self._inputs.kwargs.get("input_ids") if reads_tokens else self._inputs.tokens
        return tokens

    def grad(self, name: str) -> Tensor:
        """The gradient at a hook point that was asked for, after a backward pass.

        Several backward passes add up, as in ``.grad``.

        Args:
            name: a name or alias.

        Raises:
            RuntimeError: there was no backward pass, the point was not asked for, or nothing there has a gradient.
        """
        canonical = self.bridge.names.find(name).name
        found = self.stops.gradients.get(canonical)
        if found is not None:
            return found
        if canonical not in self.stops.seen:
            raise RuntimeError(
                f"{canonical} has no gradient: ask for it in the block (or name it in capture), with gradients "
                "switched on and something before it that wants them"
            )
        raise RuntimeError(
            f"{canonical} has no gradient yet: call backward on something that depends on it "
            "(torch.autograd.grad gives it to you directly)"
        )

    def stop(self) -> None:
        """Ends the run where it is: what follows in the model is not computed."""
        if self._state == "open":
            assert self.stops.coroutine is not None
            self.stops.coroutine.abandon()
            self._state = "stopped"

    def skip(self, first: int, last: int | None = None) -> None:
        """Lets blocks pass the residual stream through as they are given it.

        Args:
            first: the first of them; negative counts from the end.
            last: the last of them, itself included; None: the first alone.

        Raises:
            ValueError: there are no such blocks, the model has come to the first already, or cannot do without; the
                run stops at one of them, or has points there that are captured, or have hooks of a `with` statement.
        """
        bridge, n, stop = self.bridge, self.bridge.cfg.n_layers, self._layers[1]
        wanted = (first, first if last is None else last)
        a, b = (layer + n if layer < 0 else layer for layer in wanted)
        if not 0 <= a <= b < n:
            raise ValueError(f"skip{wanted}: the model has {n} blocks, 0 to {n - 1}, and first must not be behind last")
        if bridge.no_layer_runs:
            raise ValueError(f"{bridge.cfg.model_name} cannot skip blocks: {bridge.no_layer_runs}")
        if self._state != "open" or self.stops.has_begun(a):
            raise ValueError(f"skip{wanted}: the model has come to block {a} already, or may have: say it before")
        if stop is not None and b >= min(stop, n - 1):
            raise ValueError(f"skip{wanted}: with stop_at_layer={stop} the run ends at block {min(stop, n - 1)}")
        for hook in self.stops.captured:
            if hook.point.stack and a <= hook.point.depth <= b:
                raise ValueError(f"skip{wanted}: {hook.name} is captured, and would not run")
        refuse_unreached_points(bridge, lambda depth: not a <= depth <= b, f"skip{wanted}", self._begun_in)
        assert self._pass is not None
        blocks = [module_at(bridge.original_model, path) for path in bridge.block_paths[a : b + 1]]
        self._until_the_end().enter_context(bypassing(self._pass.run, blocks, *bridge.block_output))

    def leave_out(self, path: str, value: Any) -> None:
        module, points = module_at(self.bridge.original_model, path), self.bridge.wiring.points.values()
        if type(module).forward is nn.Module.forward:
            raise TypeError(f"{path} is a {type(module).__name__}, which the model does not call: skip what is in it")
        if self._state != "open":
            raise RuntimeError(f"{path} can be skipped while the trace is open")
        for hook in points:
            inside = f"{hook.point.site.path}.".startswith(f"{path}.")
            if inside and (hook in self.stops.captured or hook.has_visible_listeners):
                raise ValueError(f"{path} cannot be skipped: {hook.name}, which is captured or has a hook, is in it")
        assert self._pass is not None
        run, given = self._pass.run, GivenOutput(value)
        self._left_out[path] = given
        self._until_the_end().enter_context(bypassing(run, [module], None, 1))
        run.entering[module] = given

    def _run_to_the_end(self) -> None:
        super()._run_to_the_end()
        for path, given in self._left_out.items() if self._state == "ran" else ():
            if not given.used:
                raise OutOfStepError(
                    f"{path} was to be skipped, and the model did not come to it after that: say it before"
                )

    def invoke(self, *prompts: Any, **arguments: Any) -> NoReturn:
        """Says what is there in place of nnsight's ``tracer.invoke``.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a trace takes all its prompts at once, and one body edits each by itself: with bridge.trace([first, "
            "second]) as run: run.rows(0)[...] is the first one's part, run.rows(1)[...] the second's"
        )

    def rows(self, index: int) -> PromptRows:
        """One prompt of several: its part of every activation, without the padding of its row.

        Args:
            index: which prompt; negative counts from the end.

        Raises:
            IndexError: there is no such prompt.
            ValueError: its tokens do not stand together.
        """
        batch, length, pieces = self._all_rows()
        if not -batch <= index < batch:
            raise IndexError(f"rows({index}): the run has {batch} prompts")
        index %= batch
        start, stop = (0, length) if pieces is None else pieces[index]
        if start < 0:
            raise ValueError(f"the tokens of prompt {index} have padding between them, so it is no one piece")
        return PromptRows(self, index, start, stop, length)

    def _all_rows(self) -> tuple[int, int, list[tuple[int, int]] | None]:
        """How many prompts there are, their length, and where in it their own tokens stand; None: everywhere.

        Raises:
            RuntimeError: nothing is known of them yet.
        """
        if self._inputs is None:
            raise RuntimeError("the trace has not begun: with bridge.trace(prompt) as run: ...")
        kwargs = self._inputs.kwargs
        if (main := takes(self.bridge.core).main) in kwargs:  # images or sound, which have no padding
            return int(kwargs[main].shape[0]), 0, None
        given = kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"]
        batch, length = int(given.shape[0]), int(given.shape[1])
        mask = kwargs.get("attention_mask")
        if mask is None or mask.ndim != 2:
            return batch, length, None
        return batch, length, [_piece(row[-length:]) for row in mask]

    # Asking.

    def axes_of(self, name: str) -> list[str]:
        """The names of the axes of an activation."""
        return self.bridge.names.find(name).point.axes.split()

    def __getitem__(self, name: str) -> Tensor:
        hook = self.bridge.names.find(name)
        kept = self.stops.kept.get(hook)
        if kept is not None:
            return kept
        self._check_runs(name)
        found: Tensor = self.reach(hook).value
        return found

    def part(self, name: str, *, heads: Index = None, queries: Index = None, keys: Index = None) -> Tensor:
        self._check_runs(name)
        return super().part(name, heads=heads, queries=queries, keys=keys)

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._check_runs(name)
        super().__setitem__(name, value)

    def reach(self, asked: Any) -> Stop:
        if self._state in ("new", "stopped") or self.stops.coroutine is None:
            raise RuntimeError(
                "the trace has not begun: with bridge.trace(prompt) as run: ..."
                if self._state == "new"
                else "the run was stopped, and the model goes no further"
            )
        return self.stops.reach(asked)

    def _check_runs(self, name: str) -> None:
        start, stop = self._layers
        layers = {"start_at_layer": start, "stop_at_layer": stop}
        if self._layers != (None, None) and not points_that_run(self.bridge, [self.bridge.names.find(name)], layers):
            said = ", ".join(f"{what}={layer}" for what, layer in layers.items() if layer is not None)
            raise ValueError(f"{name} does not run with {said}")


def refuse_checkpointing(bridge: RunnableBridge) -> None:
    """Refuses a run whose blocks backward would compute again, without the body of the trace.

    Raises:
        RuntimeError: activation checkpointing is on.
    """
    if bridge.core.training and torch.is_grad_enabled() and is_checkpointed(bridge.core):
        raise RuntimeError(
            "activation checkpointing computes blocks again in backward, where nobody runs the body of a trace: use "
            "hooks (bridge.trace_edit makes them of a body), or switch it off"
        )


# ----------------------------------------------------------------------------------------------------------------------
# One prompt of several in a trace.
# ----------------------------------------------------------------------------------------------------------------------


class PromptRows(BodyActivations):
    """One prompt's part of every activation: a view of it, so that the model sees what is changed in it.

    Args:
        run: the trace.
        index: which prompt.
        start, stop: where its tokens stand.
        length: of all rows.
    """

    def __init__(self, run: Trace, index: int, start: int, stop: int, length: int) -> None:
        self._run, self._index = run, index
        self._start, self._stop, self._length = start, stop, length

    def __getitem__(self, name: str) -> Tensor:
        """The prompt's activation, with a batch axis of one, and without padding."""
        return self._part(self._run[name], self._run.axes_of(name))

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        """Writes to it; what `value` is spread over is the prompt's own part."""
        part = self[name]
        if value is not part:
            part[...] = value

    @property
    def logits(self) -> Tensor:
        """The prompt's logits, ``[1, pos, d_vocab]``."""
        return self._part(self._run.logits, ["batch", "pos", "d_vocab"])

    @property
    def tokens(self) -> Tensor | None:
        """The prompt's tokens, ``[1, pos]``."""
        tokens = self._run.tokens
        return None if tokens is None else self._part(tokens, ["batch", "pos"])

    def _part(self, x: Tensor, axes: list[str]) -> Tensor:
        if axes[0] != "batch":
            raise ValueError(f"an activation with the axes {' '.join(axes)} has no rows of prompts")
        part = x[self._index : self._index + 1]
        for axis, name in enumerate(axes):
            if name in ("pos", "key_pos", "encoder_pos", "encoder_key_pos") and x.shape[axis] == self._length:
                part = part.narrow(axis, self._start, self._stop - self._start)
        return part


def _piece(mask: Tensor) -> tuple[int, int]:
    """Where the tokens of a row stand; (-1, -1) where they are in several pieces."""
    places = mask.nonzero().flatten().tolist()
    if not places or places[-1] - places[0] + 1 != len(places):
        return (-1, -1)
    return places[0], places[-1] + 1
