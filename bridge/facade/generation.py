"""Generating text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import StoppingCriteria

from adapters import imports as versions
from bridge import generation, programs
from bridge import trace as tracing
from bridge.arguments import refuse_wrong_types
from bridge.facade.runs import RunMethods
from bridge.facade.weights import WeightMethods
from bridge.hooks.context import CURRENT, without_hooks
from bridge.hooks.hooks import checked_function
from bridge.hooks.names import NamesFilter
from bridge.interventions.probes import FittedProbe, probes_at
from bridge.run.inputs import NAMES, HookSpec, Input, Request, unpacked
from bridge.run.run import check_specs
from bridge.run.tokenization import Text, as_tokens, texts_in

T = TypeVar("T")


def _unpacked_prompt(input: Input, more: dict[str, Any]) -> tuple[Input, dict[str, Any]]:
    """Return the prompt in a tokenizer's output, and the other arguments, including its mask."""
    by_name = isinstance(input, str) and not input and any(name in more for name in NAMES)
    mask = more.pop("attention_mask", None)
    prompt, mask, more = unpacked(None if by_name else input, mask, more)
    if mask is not None:
        more["attention_mask"] = mask
    return "" if prompt is None else prompt, more  # "": images or sound, passed by name


class GenerationMethods(RunMethods, WeightMethods):
    """A bridge's methods for generation, traces and programs."""

    @property
    def step(self) -> int | None:
        """The current step of a generation: 0 for the prompt, then 1, 2, ...; None outside a
        generation.
        """
        running = CURRENT.get().generation
        return None if running is None else running.step

    def generate(
        self,
        input: Input = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        freq_penalty: float = 0.0,
        repetition_penalty: float | None = None,
        *,
        num_return_sequences: int = 1,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str | None = "input",
        output_logits: bool = False,
        return_cache: bool = False,
        return_input_tokens: bool = False,
        readings: Sequence[FittedProbe] = (),
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None = None,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        verbose: bool = True,
        program: programs.programs.Program | None = None,
        inputs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """Continue a prompt with the model's own `generate`. Hooks act on every step, including the
        prompt's. Arguments that are None default to the model's `generation_config`.

        Args:
            input: a text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos,
                d_model]``; a tokenizer's output is accepted too, as one object or as keyword
                arguments.
            max_new_tokens: the maximum number of new tokens.
            stop_at_eos: end a row at EOS.
            eos_token_id: the EOS token, or several; None: the model's.
            do_sample: sample instead of taking the most likely token.
            top_k, top_p, temperature: options of sampling; ``top_k=0`` samples from all tokens.
            freq_penalty: subtracted from a token's logit for each of its occurrences in the
                sequence.
            repetition_penalty: divides the logits (if negative, multiplies them) of tokens that
                occur in the sequence.
            num_return_sequences: the number of continuations of each prompt.
            use_past_kv_cache: keep keys and values between steps.
            prepend_bos: start texts with BOS (never twice); None: ``cfg.default_prepend_bos``.
            padding_side: the side on which shorter rows are padded in the result. On either side,
                each row is continued as if it were run on its own.
            return_type: ``"input"`` (as the input: text or tokens), ``"str"``, ``"tokens"``.
            output_logits: return a `ModelOutput` with ``sequences`` and ``logits`` (one ``[batch,
                d_vocab]`` for each step) in place of text or tokens.
            return_cache: also return the activations of every token that the model processed: all
                but the last, which is only predicted. They are collected from the steps themselves.
            return_input_tokens: also return the prompt's tokens.
            readings: probes; also return their readings, as `readings` does for texts: for each
                row, the `ProbeReading` of each probe by its name, of the row's own tokens but the
                last. With `return_cache`, their hook points are in the cache, too.
            stop_strings: end a row when its text ends with one of these.
            stopping_criteria: one of transformers' `StoppingCriteria`, or a list of them.
            names_filter, device: for the cache, as in `run_with_cache`.
            verbose: show a progress bar.
            program: a program of this bridge to run in each step in place of the model, with the
                hooks that it was made with. For a compiled program, keys and values are kept in a
                cache of fixed size.
            inputs: the program's declared inputs.
            more: any field of `GenerationConfig`, any argument of the model's `generate` or
                `forward` (`attention_mask`, `decoder_input_ids`, `pixel_values`, ...).

        Returns:
            The continued prompts; with `return_cache`, `readings` or `return_input_tokens`, a tuple
            of output, cache, readings and input tokens, without those that were not requested.

        Raises:
            TypeError: an unknown argument, or a model that cannot generate.
            ValueError: the context is full; text requested without a tokenizer; a cache or readings
                requested for beam search; readings of embeddings, or of several rows that stop
                strings or criteria end.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> prompt = "When Mary and John went to the store, John gave a drink to"
            >>> text = bridge.generate(prompt, max_new_tokens=2, do_sample=False, verbose=False)
            >>> text[len(prompt) :]
            ' Mary.'
        """
        input, more = _unpacked_prompt(input, more)
        if inputs and program is None:
            raise ValueError("inputs are those of a program: pass program=")
        runner = None
        if program is not None:
            runner = program.generating(inputs or {})
            more.setdefault("disable_compile", True)
            if program.compiled:
                more.setdefault("cache_implementation", "static")
        return generation.generation.generate(
            self,
            input,
            generation.options.GenerationOptions(
                max_new_tokens=max_new_tokens,
                stop_at_eos=stop_at_eos,
                eos_token_id=eos_token_id,
                do_sample=do_sample,
                top_k=top_k,
                top_p=top_p,
                temperature=temperature,
                freq_penalty=freq_penalty,
                repetition_penalty=repetition_penalty,
                num_return_sequences=num_return_sequences,
                use_past_kv_cache=use_past_kv_cache,
                prepend_bos=prepend_bos,
                padding_side=padding_side,
                return_type=return_type,
                output_logits=output_logits,
                return_cache=return_cache,
                return_input_tokens=return_input_tokens,
                readings=readings,
                stop_strings=stop_strings,
                stopping_criteria=stopping_criteria,
                names_filter=names_filter,
                device=device,
                verbose=verbose,
                more=more,
            ),
            runner,
        )

    def generate_batch(
        self,
        prompts: Sequence[Text] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        max_new_tokens: int = 10,
        *,
        interventions: Sequence[HookSpec] = (),
        each: Sequence[Sequence[HookSpec]] | None = None,
        capture: NamesFilter = (),
        readings: Sequence[FittedProbe] = (),
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        prepend_bos: bool | None = None,
        attention_mask: Tensor | None = None,
        output_logits: bool = False,
        verbose: bool = True,
    ) -> Iterator[generation.batch.Answer]:
        """Continue many prompts at once with transformers' continuous batching, each as if it were
        run on its own.

        Tokens of all requests share each forward pass, without padding. A request's function
        receives only that request's activations, ``[1, positions, ...]``; other active hooks are
        called for every request. Pages of keys and values are not shared between requests, CUDA
        graphs are off, and prompts are not split over passes. The number of concurrent requests
        depends on the model and on half of the free memory.

        Args:
            prompts: texts, chats, or tokens ``[pos]`` for each prompt.
            max_new_tokens: the maximum number of new tokens per prompt.
            interventions: pairs (hook points, function) that apply to all requests, as for
                `run_with_hooks`.
            each: one such list per request; its functions are called after those of
                `interventions`.
            capture: hook points whose activations are kept, for every token but the last.
            readings: probes, whose hook points are captured too.
            stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature, prepend_bos: as for
            `generate`.
            attention_mask: for prompts given as tokens, ``[request, pos]``: 1 for tokens and 0 for
                padding, which is removed.
            output_logits: keep the logits of each new token.
            verbose: show a progress bar.

        Returns:
            An iterator of finished requests, in the order in which they finish. If a request fails,
            for example because its edits produce NaN or infinity, its `error` says why, and the
            others continue. Leaving the loop ends the generation.

        Raises:
            ValueError: a hook point whose tokens cannot be assigned to requests; a model that gives
                different results for several requests at once (tested once for each model); another
                batch is running on it; padding without a mask.
            UnknownHookError: a name that no hook point has.
            TypeError: an invalid prompt or pair.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.interventions import Scale
            >>> bridge = TransformerBridge.boot_embedded()
            >>> each = [[], [("blocks.2.hook_resid_post", Scale(0.5, part="generated"))]]
            >>> options = {"each": each, "do_sample": False, "verbose": False}
            >>> answers = bridge.generate_batch(["Mary and", "Mary and"], 3, **options)
            >>> sorted(answer.index for answer in answers)
            [0, 1]
        """
        probes = probes_at(readings, self)
        if probes:
            captured = self.select_hooks(capture) if capture != () else []
            capture = [*dict.fromkeys([*[hook.name for hook in captured], *probes])]
        options = generation.options.GenerationOptions(
            max_new_tokens=max_new_tokens,
            names_filter=capture,
            stop_at_eos=stop_at_eos,
            eos_token_id=eos_token_id,
            do_sample=do_sample,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            output_logits=output_logits,
            verbose=verbose,
        )
        rows = generation.batch.prompts_of(self, prompts, prepend_bos, attention_mask)
        answers = generation.batch.generate_batch(self, rows, interventions, each, options)
        return generation.batch.with_readings(answers, probes) if probes else answers

    def hf_generate(
        self,
        input: Input = "",
        *,
        prepend_bos: bool | None = None,
        return_type: str | None = None,
        stop_at_eos: bool = True,
        use_past_kv_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the model's own `generate`, with its own arguments and return values; hooks act on
        every step.

        Args:
            input: text, texts, tokens or embeddings, as for `generate`; texts are left-padded.
            prepend_bos: start texts with BOS.
            return_type: None: the return value of the model's `generate`; ``"tokens"``, or
                ``"str"`` (or ``"input"``, as for `generate`) for its sequences as text.
            stop_at_eos: False continues after the end of a text.
            use_past_kv_cache: `generate`'s ``use_cache``; None: the model's default.
            kwargs: passed on unchanged.

        Raises:
            ValueError: an unknown return type.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.hf_generate("Mary and", max_new_tokens=3, do_sample=False).shape
            torch.Size([1, 6])
        """
        if not stop_at_eos:
            kwargs["eos_token_id"] = None
        if use_past_kv_cache is not None:
            kwargs["use_cache"] = use_past_kv_cache
        return generation.generation.hf_generate(self, input, prepend_bos, kwargs, return_type)

    def generate_stream(
        self, input: Input = "", *, max_tokens_per_yield: int | None = None, **arguments: Any
    ) -> Iterator[Any]:
        """Yield a continuation piece by piece, the prompt first.

        The pieces join to exactly what `generate` returns: strings (a list of strings, one for each
        row, for a list of texts), or tokens ``[batch, new]`` to be joined along the last axis. The
        model runs in a separate thread, with the hooks of the calling thread; leaving the loop
        early ends it at the next token.

        Args:
            input: as for `generate`.
            max_tokens_per_yield: the number of tokens in a piece, fewer in the last one (tokens
                without text do not count); None: one piece per token or complete character.
            arguments: as for `generate`, without `return_cache`, `return_input_tokens`,
                `output_logits` and `readings`.

        Raises:
            TypeError: an unknown argument.
            ValueError: as `generate`; or tokens that would need padding on the right.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> options = {"max_new_tokens": 3, "do_sample": False, "verbose": False}
            >>> pieces = list(bridge.generate_stream("Mary and", **options))
            >>> "".join(pieces) == bridge.generate("Mary and", **options)
            True
        """
        stream = generation.generation.stream(self, input, arguments)
        return generation.generation.in_pieces(stream, max_tokens_per_yield)

    # Tracing: interventions as plain Python, in the order in which the model runs.

    @property
    def _model_order(self) -> tracing.stops.ModelOrder:
        """The forward order of the bridge's hook points, computed by the first trace."""
        order = self.__dict__.get("_places")
        if not isinstance(order, tracing.stops.ModelOrder) or not order.are_of(self.wiring.points):
            order = self.__dict__["_places"] = tracing.stops.ModelOrder(self.wiring.points)
        return order

    @refuse_wrong_types
    def trace(
        self,
        input: Input | None = None,
        *,
        capture: Sequence[str] = (),
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | NDArray[Any] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **model_kwargs: Any,
    ) -> tracing.trace.Trace:
        """Return a run of the model that pauses wherever the body of a ``with`` statement reads an
        activation. The body is ordinary Python. ``run[name]`` runs the model up to that hook point
        and returns the activation, a real tensor; the model continues with your in-place changes or
        assignments (``run[name] = x``). Request points in forward order. This way of writing
        interventions is nnsight's idea (Fiotto-Kaufman et al. 2024). Its later versions run the
        body in a greenlet, in strict turns with the model; here the model runs in the greenlet, and
        the body stays in its own frame.

        Args:
            input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer,
                model_kwargs: as for `forward`.
            capture: hook points whose activations can be read in any order, and after the block.

        Returns:
            The trace, for a ``with`` statement.

        Raises:
            TypeError: an argument that neither the bridge nor the model knows, or an input of a
                wrong type.
            ValueError: a layer out of range, a prompt that is too long.
            UnknownHookError: a name that no hook point has.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> prompt = "When Mary and John went to the store, John gave a drink to"
            >>> with bridge.trace(prompt) as run:
            ...     pattern = run["blocks.2.attn.hook_pattern"]
            ...     run["blocks.3.attn.hook_z"][:, :, 1] = 0
            >>> pattern.shape, run.logits.shape[0]
            (torch.Size([1, 4, 15, 15]), 1)
        """
        request = Request(
            input,
            prepend_bos,
            padding_side,
            attention_mask,
            start_at_layer,
            stop_at_layer,
            model_kwargs,
        )
        return tracing.trace.Trace(self, self._model_order, request, capture)

    def trace_generate(
        self, input: Input = "", **arguments: Any
    ) -> tracing.generation.GenerationTrace:
        """Return a generation that pauses where the body of a ``with`` statement reads activations.
        ``for step in run.steps`` iterates over its steps, starting with the prompt's;
        ``step[name]`` works like ``run[name]`` in a trace, for that step. Edits outside the loop
        (``run[name][:, -1] = 0``, ``run[name] += v``, ``run[name] = x``) apply at every step.

        Args:
            input, arguments: as for `generate`, except `return_type`, `return_cache`,
                `return_input_tokens`, `output_logits`, `readings`, `names_filter` and `device`;
                `verbose` is off by default.

        Returns:
            The generation, for a ``with`` statement; afterwards it has `tokens` and `text`.

        Raises:
            TypeError: an unknown argument, or a model that cannot generate.
            ValueError: the context is full.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.trace_generate("Mary and", max_new_tokens=3, do_sample=False) as run:
            ...     run["blocks.3.hook_mlp_out"] *= 0.5
            ...     norms = [step["blocks.0.hook_resid_post"].norm().item() for step in run.steps]
            >>> len(norms), run.tokens.shape
            (3, torch.Size([1, 6]))
        """
        return tracing.generation.GenerationTrace(self, self._model_order, input, arguments)

    @refuse_wrong_types
    def trace_edit(
        self,
        body: tracing.edit.TraceBody,
        *,
        prompt: Input | None = None,
        points: Sequence[str] | None = None,
    ) -> tracing.edit.Edit:
        """Turn the body of a trace, written as a function, into hooks for `hooks`, `run_with_hooks`
        and `generate`. In each forward pass (in a generation, at each step) the body runs once,
        alternating with the model. A point that does not run is skipped, as a hook there would be.

        Args:
            body: called with an object that gives access to activations: ``run[name]`` and
                ``run[name] = x``.
            prompt: the prompt of a trial run, which finds the hook points that the body requests;
                None: four tokens.
            points: the hook points that the body requests, instead of a trial run.

        Returns:
            Pairs of a name and a function.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the body requests no activation.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> def halve_if_large(run):
            ...     if run["blocks.1.hook_resid_post"].norm() > 1:
            ...         run["blocks.2.hook_mlp_out"] *= 0.5
            >>> points = ["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out"]
            >>> edit = bridge.trace_edit(halve_if_large, points=points)
            >>> with bridge.hooks(fwd_hooks=edit):
            ...     loss = bridge("Mary and John", return_type="loss")
        """
        if points is None:
            probe = torch.zeros(1, 4, dtype=torch.long, device="cpu") if prompt is None else prompt
            # The user's hooks see nothing of it.
            with torch.no_grad(), without_hooks(), self.trace(probe) as run:
                hooks = tracing.edit.points_asked_for(self.names, body, run)
        else:
            hooks = [self.names.find(name) for name in points]
        return tracing.edit.Edit(self.names, body, hooks)

    def shapes(self, input: Input, **forward_kwargs: Any) -> tracing.access.Shapes:
        """Return every activation's shape and dtype without computing anything: a run on fake
        tensors.

        Args:
            input, forward_kwargs: as for `forward`. The model may be on the meta device.

        Returns:
            A mapping from all names of each hook point. If a size depends on values (how many
            tokens an expert receives), the shape contains None. Points that do not run for this
            input are absent.

        Raises:
            RuntimeError: the model's own code needs a tensor's value.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.shapes("Mary and John")["blocks.2.attn.hook_pattern"]
            PointShape(shape=(1, 4, 4, 4), dtype=torch.float32)
        """
        return tracing.access.shapes(self, input, forward_kwargs)

    def save(self, x: T) -> T:
        """Return `x` unchanged, for code written for nnsight: values of a trace are real tensors
        and need no saving.

        Args:
            x: anything.
        """
        return x

    # Programs: a run with its hooks as a plain module, here or in another runtime.

    def program(
        self,
        capture: NamesFilter = (),
        interventions: Sequence[HookSpec] = (),
        inputs: Mapping[str, Tensor | float] | None = None,
    ) -> programs.programs.Program:
        """Return a run with captured activations and interventions as a plain module that can be
        compiled, exported and served. The hooks are built in once: its forward uses no context and
        attaches nothing. Currently active hooks (added ones, and those of an open ``with``) become
        part of it.

        Args:
            capture: the activations to return: a name or alias, a list of them, or a function of
                the name.
            interventions: pairs (hook points, function), as for `run_with_hooks`, or the result of
                `trace_edit`. A function is called as ``fn(activation, hook=point)``, with the
                declared inputs that its signature names as further keywords.
            inputs: the declared inputs by name, each with an example (a tensor, or a number): a
                steering vector, a strength, a value to patch in, a mask over heads. Each call
                passes its own values.

        Returns:
            A module: ``program(tokens, attention_mask=..., vector=...)`` returns a mapping from
            ``"logits"`` and each captured name to its tensor.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a hook point that programs do not support; a model that reads images or
                sound before text; an input that no function takes; a filter that matches nothing.
            TypeError: a function with a parameter that is not a declared input.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> def scale(activation, hook, strength):
            ...     return activation * strength
            >>> program = bridge.program(
            ...     capture=["blocks.2.attn.hook_pattern"],
            ...     interventions=[("blocks.1.hook_mlp_out", scale)],
            ...     inputs={"strength": 1.0},
            ... )
            >>> tokens = bridge.to_tokens("Mary and John")
            >>> torch.equal(program(tokens, strength=1.0)["logits"], bridge(tokens))
            True
        """
        check_specs("interventions", interventions)
        pairs = []
        for names, fn in interventions:
            pairs += [(hook, checked_function(hook, fn)) for hook in self.select_hooks(names)]
        none = isinstance(capture, Sequence) and not isinstance(capture, str) and not capture
        points = [] if none or capture is None else self.select_hooks(capture)
        return programs.programs.Program(self, points, pairs, inputs or {})

    def export(
        self,
        example: Input | Mapping[str, Tensor],
        format: str = "dynamo",
        *,
        capture: NamesFilter = (),
        interventions: Sequence[HookSpec] = (),
        inputs: Mapping[str, Tensor | float] | None = None,
        dynamic: bool = True,
        path: str | Path | None = None,
        **options: Any,
    ) -> versions.ExportedModel:
        """Export a run with captured activations and interventions for another runtime, through
        transformers' exporters.

        Args:
            example: text, texts, tokens ``[batch, pos]``, or the model's arguments by name, as a
                tokenizer returns them. The exported program takes the same arguments, and the
                declared inputs.
            format: ``"dynamo"`` (`torch.export`), ``"onnx"``, ``"executorch"`` or ``"openvino"``.
            capture, interventions, inputs: as for `program`.
            dynamic, path, options: as for `Program.export`.

        Returns:
            transformers' `ExportedModel`: ``exported(input_ids=..., vector=...)`` runs it in its
            runtime, with the same result as the program.

        Raises:
            VersionError: transformers is older than 5.23.
            ImportError: the format needs something that is not installed; the error names the
            command. UnknownHookError, TypeError, ValueError: as for `program` and `Program.export`.
        """
        program = self.program(capture, interventions, inputs)
        if (texts := texts_in(example)) is not None:
            batch = self.batch_of(texts)
            mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
            example = {"input_ids": batch.tokens, "attention_mask": mask}
        elif not isinstance(example, Mapping):
            example = {"input_ids": as_tokens(example)}
        return program.export(example, format, dynamic=dynamic, path=path, **options)
