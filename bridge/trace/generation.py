"""`GenerationTrace`: a generation that runs in step with the body of a ``with`` statement."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.utils import ModelOutput

from adapters.views import Args, Kwargs
from bridge.generation.generation import generating, generation_of, run_generate
from bridge.generation.options import GenerationOptions, Steps, aligned, prepared, rows_of, texts_of
from bridge.hooks.context import CURRENT, ForwardPass, Generation, Listener, of_the_next_run
from bridge.hooks.hooks import HookPoint
from bridge.run.inputs import Input, RunnableBridge
from bridge.trace.access import Access
from bridge.trace.coroutine import Coroutine
from bridge.trace.edit import EveryStep, InPlaceEdit, apply
from bridge.trace.stops import ModelOrder, PointPart, Stop, Target
from bridge.trace.trace import InStep
from bridge.wiring.compiled import uncompiled

_NOT_HERE = (
    "return_cache",
    "return_input_tokens",
    "output_logits",
    "readings",
    "names_filter",
    "device",
    "return_type",
)


class GenerationTrace(InStep):
    """A generation that pauses where the body of a ``with`` statement reads an activation.

    Args:
        bridge: the bridge.
        places: the order of its hook points.
        input, arguments: as for `TransformerBridge.generate`.
    """

    def __init__(
        self, bridge: RunnableBridge, places: ModelOrder, input: Input, arguments: Kwargs
    ) -> None:
        for name in _NOT_HERE:
            if name in arguments:
                raise TypeError(
                    f"{name} is an argument of generate; a traced generation has run.tokens and"
                    " run.text"
                )
        self.bridge = bridge
        self._options = GenerationOptions.of({"verbose": False, **arguments})
        self._prompt, self._arguments = prepared(bridge, input, self._options)
        self._generation = generation_of(bridge, self._prompt, self._arguments)
        super().__init__(bridge, places)
        self._edits: dict[HookPoint, list[InPlaceEdit]] = {}
        self._steps = Steps(tqdm(disable=True), self._generation)
        self._awaited: int | None = None  # the step that the loop waits for
        self._current = 0
        self._in_loop = False
        self._sequences: Tensor | None = None

    # The block.

    once = "a traced generation is one generation: make a new one for the next"

    def _begin(self, coroutine: Coroutine) -> None:
        begins = self.bridge.core.register_forward_pre_hook(self._pass_begins, prepend=True)
        self._until_the_end().callback(begins.remove)
        self._until_the_end().callback(self._edits.clear)
        self._show(self.bridge.names, _GenerationStep(self))

    def _work(self) -> None:
        """Run the model's side."""
        # Our hook precedes the one that counts, so that a step ends before the next number is set.
        self._arguments["stopping_criteria"].insert(0, self._step_ends)
        self._arguments["stopping_criteria"].append(self._steps)
        model = self.bridge.original_model
        with (
            of_the_next_run(self.scope),
            generating(self.bridge, self._generation, self._prompt),
            uncompiled(model),
        ):
            output = run_generate(self.bridge, self._prompt, self._arguments)
        self._sequences = output["sequences"] if isinstance(output, ModelOutput) else output

    def _step_ends(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """End a step. This is a stopping criterion that never stops a row."""
        self.stops.end_step()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def _pass_begins(self, module: nn.Module, args: Args) -> None:
        """Begin a forward pass. This is a forward hook."""
        step, awaited = self._generation.step, self._awaited
        if self.scope in CURRENT.get().visible and awaited is not None and step >= awaited:
            self._awaited, self._current = None, step
            assert self.stops.coroutine is not None
            self.stops.coroutine.pause()

    # The steps.

    @property
    def steps(self) -> Iterator[_GenerationStep]:
        """Yield the steps, starting with the prompt's, until the generation ends."""
        if self._state != "open":
            raise RuntimeError(
                "the steps are there in the block: with bridge.trace_generate(prompt) as run: ..."
            )
        coroutine = self.stops.coroutine
        assert coroutine is not None
        self._in_loop = True
        try:
            if self._current == 0 and not coroutine.finished:
                yield _GenerationStep(self, 0)
            while not coroutine.finished and self._state == "open":
                self._awaited = self._current + 1
                while self._awaited is not None and not coroutine.finished:
                    self.stops.resume()
                self._awaited = None
                self.stops.late_edits.check()
                self.stops.late_edits.forget()
                if not coroutine.finished:
                    yield _GenerationStep(self, self._current)
        finally:
            self._in_loop = False

    def stop(self) -> None:
        """End the generation after the current step; the tokens so far are kept."""
        self._steps.cancelled = True

    @property
    def tokens(self) -> Tensor:
        """Return the prompt and its continuation, ``[batch, pos]``. In the block, finish the
        generation first.
        """
        return aligned(self._finished_sequences(), self._prompt)

    @property
    def text(self) -> str | list[str]:
        """Return the tokens as text: a string if the prompt was one text.

        Raises:
            ValueError: the bridge has no tokenizer.
        """
        rows = rows_of(self._prompt, self._finished_sequences())
        return texts_of(self.bridge, rows, self._prompt)

    def _finished_sequences(self) -> Tensor:
        """Finish the generation, and return its tokens."""
        self._run_to_the_end()
        if self._sequences is None:
            raise RuntimeError(
                "nothing was generated: the block was left by an error, or has not begun"
            )
        return self._sequences

    # Edits of every step.

    def __getitem__(self, name: str) -> EveryStep:
        """Return a writable activation that represents every later step."""
        hook = self.bridge.names.find(name)
        return EveryStep(hook.name, lambda operation: self._add(hook, operation))

    def __setitem__(self, name: str, value: Tensor | float | EveryStep) -> None:
        """Replace an activation at every later step.

        Args:
            name: a name or alias.
            value: a value that broadcasts over the activation, whose number of positions differs
                between steps.
        """
        self[name].assign(value)

    def _add(self, hook: HookPoint, operation: InPlaceEdit) -> None:
        if self._state != "open":
            raise RuntimeError(
                "edits of every step are made in the block: with bridge.trace_generate(...) as"
                " run: ..."
            )
        if hook not in self._edits:
            operations: list[InPlaceEdit] = []
            generation = self._generation

            def edit(act: Tensor, hook: HookPoint) -> None:
                apply(operations, act, hook.name, generation.step)

            listener = Listener("fwd", edit, self.scope)
            self.bridge.wiring.add(hook, listener)
            self._until_the_end().callback(self.bridge.wiring.remove, hook, (listener,))
            self._edits[hook] = operations
        self._edits[hook].append(operation)

    def reach_in_step(self, index: int | None, target: Target) -> Stop:
        """Run the model up to a place in a step; None: the loop's current step.

        Raises:
            RuntimeError: the step has ended, or no step is current.
        """
        if index is None and not self._in_loop:
            if isinstance(target, tuple):
                name, remedy = ".".join(target), "ask"
            else:
                name = target.hook.name if isinstance(target, PointPart) else target.name
                remedy = f'write to run["{name}"], which is done at every step, or ask'
            raise RuntimeError(
                f"{name} is of one step, and the loop over run.steps is at none: {remedy} in the"
                " loop"
            )
        if self._state != "open" or index not in (None, self._current):
            raise RuntimeError(
                f"step {self._current if index is None else index} has ended: what is asked for in"
                " a step is asked for in its turn of the loop"
            )
        return self.stops.reach(target)


class _GenerationStep(Access):
    """A step of a traced generation.

    Args:
        run: the generation.
        index: 0 for the prompt's step, then 1, 2, ...; None: the loop's current step, to which
            ``bridge.blocks[3].output`` refers.
    """

    def __init__(self, run: GenerationTrace, index: int | None = None) -> None:
        super().__init__(run.bridge, run.stops)
        self._run, self._index = run, index

    @property
    def index(self) -> int:
        """Return the index of the step."""
        return self._run._current if self._index is None else self._index

    @property
    def shows(self) -> tuple[ForwardPass | None, Generation | None]:
        return None, self._run._generation

    def reach(self, target: Target) -> Stop:
        return self._run.reach_in_step(self._index, target)
