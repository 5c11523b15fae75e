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
from bridge.facade.runs import RunMethods
from bridge.facade.weights import WeightMethods
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.context import CURRENT, without_hooks
from bridge.hooks.hooks import checked_function
from bridge.hooks.names import NamesFilter
from bridge.run.inputs import NAMES, HookSpec, Input, Request, unpacked
from bridge.run.run import check_specs
from bridge.run.tokenization import as_tokens

T = TypeVar("T")


class GenerationMethods(RunMethods, WeightMethods):
    """The methods of a bridge that generate."""

    @property
    def step(self) -> int | None:
        """Which step of a generation this is: 0 for the prompt, then 1, 2, ...; None outside of a generation."""
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
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None = None,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        verbose: bool = True,
        program: programs.programs.Program | None = None,
        inputs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """Continues a prompt by the model's own `generate`. Hooks act on every step, the prompt's included.

        Arguments that are None are the model's own (its `generation_config`).

        Args:
            input: a text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``; what a
                tokenizer gives is taken, too, as it is or by names.
            max_new_tokens: how many tokens to make at most.
            stop_at_eos: end a row at EOS.
            eos_token_id: what counts as EOS; None: what the model says.
            do_sample: sample, rather than take the likeliest token.
            top_k, top_p, temperature: of sampling; ``top_k=0`` samples from all tokens.
            freq_penalty: subtracted from a token's logit for every time it stands in the sequence.
            repetition_penalty: divides (multiplies, when negative) the logits of tokens that stand there.
            num_return_sequences: how many continuations of each prompt.
            use_past_kv_cache: keep keys and values between steps.
            prepend_bos: start texts with BOS (never twice); None: ``cfg.default_prepend_bos``.
            padding_side: where shorter rows are padded in what is returned. Each row is continued as if it were alone,
                whichever side it is.
            return_type: ``"input"`` (as the input: text or tokens), ``"str"``, ``"tokens"``.
            output_logits: return a `ModelOutput` with ``sequences`` and ``logits`` (one ``[batch, d_vocab]`` for each
                step) in place of text or tokens.
            return_cache: also return the activations of every token that the model processed: all but the last, which
                is only predicted. They are collected from the steps themselves.
            return_input_tokens: also return the tokens that the prompt was made into.
            stop_strings: end a row where its text ends with one of these.
            stopping_criteria: one of transformers' `StoppingCriteria`, or a list of them.
            names_filter, device: of the cache, as for `run_with_cache`.
            verbose: show a progress bar.
            program: a program of this bridge that is run in each step in place of the model; hooks are as it was made.
                With a compiled one, keys and values are kept in a cache of fixed size.
            inputs: its declared inputs.
            more: any field of `GenerationConfig`, any argument of the model's `generate` or `forward`
                (`attention_mask`, `decoder_input_ids`, `pixel_values`, ...).

        Returns:
            The continued prompts; with `return_cache` and `return_input_tokens` a tuple: output, cache, input tokens.

        Raises:
            TypeError: an argument that nobody knows, or a model that does not generate.
            ValueError: no room in the context; text asked for without a tokenizer; a cache of a beam search.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> prompt = "When Mary and John went to the store, John gave a drink to"
            >>> bridge.generate(prompt, max_new_tokens=2, do_sample=False, verbose=False)[len(prompt):]
            ' Mary.'
        """
        by_name = isinstance(input, str) and not input and any(name in more for name in NAMES)
        input, mask, more = unpacked(None if by_name else input, more.pop("attention_mask", None), more)
        input = "" if input is None else input  # images or sound by their name
        if mask is not None:
            more["attention_mask"] = mask
        if inputs and program is None:
            raise ValueError("inputs are those of a program: pass program=")
        if program is not None:
            more = {"disable_compile": True, **({"cache_implementation": "static"} if program.compiled else {}), **more}
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
                stop_strings=stop_strings,
                stopping_criteria=stopping_criteria,
                names_filter=names_filter,
                device=device,
                verbose=verbose,
                more=more,
            ),
            None if program is None else program.generating(inputs or {}),
        )

    def generate_batch(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        max_new_tokens: int = 10,
        *,
        interventions: Sequence[HookSpec] = (),
        each: Sequence[Sequence[HookSpec]] | None = None,
        capture: NamesFilter = (),
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
        """Continues many prompts at once, by transformers' continuous batching, each as if it were alone.

        Tokens of all requests share each forward pass, without padding. A function of a request is given that
        request's own activations ``[1, its positions, ...]``; hooks that a run would see now are called for every
        request. Pages of keys and values are not shared between requests, CUDA graphs are off, and prompts are not
        split over passes. How many are under way follows from the model and half of the memory that is free.

        Args:
            prompts: texts, or tokens ``[pos]`` of each.
            max_new_tokens: of each, at most.
            interventions: pairs (hook points, function) for all requests, as for `run_with_hooks`.
            each: one such list for each request, called after those.
            capture: hook points whose activations are kept, for every token but the last.
            stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature, prepend_bos: as for `generate`.
            attention_mask: of tokens ``[request, pos]``, 1 for tokens and 0 for padding, which is left out.
            output_logits: keep the logits of each new token.
            verbose: show a progress bar.

        Returns:
            An iterator of finished requests, in the order in which they finish. A request that fails says why in its
            `error`, and the others go on: one whose edits make something that is no number, or infinite, too. Leaving
            the loop ends the generation.

        Raises:
            ValueError: a hook point whose tokens cannot be told apart by request; a model of which several requests at
                once are not what each is alone, which is tried once for each model; a batch under way on it; padding
                that no mask tells.
            UnknownHookError: a name that no hook point has.
            TypeError: what is no prompt, or no pair.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.interventions import Scale
            >>> bridge = TransformerBridge.boot_embedded()
            >>> each = [[], [("blocks.2.hook_resid_post", Scale(0.5, part="generated"))]]
            >>> found = bridge.generate_batch(["Mary and", "Mary and"], 3, each=each, do_sample=False, verbose=False)
            >>> sorted(answer.index for answer in found)
            [0, 1]
        """
        options = generation.options.GenerationOptions(
            max_new_tokens=max_new_tokens, names_filter=capture, stop_at_eos=stop_at_eos, eos_token_id=eos_token_id,
            do_sample=do_sample, top_k=top_k, top_p=top_p, temperature=temperature, output_logits=output_logits,
            verbose=verbose,
        )  # fmt: skip
        given = generation.batch.prompts_of(self, prompts, prepend_bos, attention_mask)
        return generation.batch.generate_batch(self, given, interventions, each, options)

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
        """The model's own `generate`, with its own arguments and return values; hooks act on every step.

        Args:
            input: text, texts, tokens or embeddings, as for `generate`; texts are padded in front.
            prepend_bos: start texts with BOS.
            return_type: None: what the model's `generate` returns; ``"tokens"``, or ``"str"`` (or ``"input"``, as for
                `generate`) for its sequences as text.
            stop_at_eos: False goes on after the end of a text.
            use_past_kv_cache: ``use_cache`` of `generate`; None: the model's own.
            kwargs: passed on as they are.

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
        """Yields a continuation piece by piece, the prompt first.

        The pieces join to exactly what `generate` returns: strings (a list of strings, one for each row, for a list of
        texts), or tokens ``[batch, new]`` to be joined along the last axis. The model runs in a thread of its own, with
        the hooks of the thread that calls; leaving the loop early ends it at the next token.

        Args:
            input: as for `generate`.
            max_tokens_per_yield: so many tokens in a piece, fewer in the last one (those without a
                text do not count); None: pieces as they come.
            arguments: as for `generate`, without `return_cache`, `return_input_tokens` and `output_logits`.

        Raises:
            TypeError: an argument that nobody knows.
            ValueError: as `generate`; or tokens that would have to be padded behind.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> pieces = list(bridge.generate_stream("Mary and", max_new_tokens=3, do_sample=False, verbose=False))
            >>> "".join(pieces) == bridge.generate("Mary and", max_new_tokens=3, do_sample=False, verbose=False)
            True
        """
        return generation.generation.in_pieces(
            generation.generation.stream(self, input, dict(arguments)), max_tokens_per_yield
        )

    # Tracing: interventions as plain Python, in the order in which the model runs.

    @property
    def _model_order(self) -> tracing.stops.ModelOrder:
        """The order of its hook points, worked out by the first trace."""
        found = self.__dict__.get("_places")
        if not isinstance(found, tracing.stops.ModelOrder) or not found.are_of(self.wiring.points):
            found = self.__dict__["_places"] = tracing.stops.ModelOrder(self.wiring.points)
        return found

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
        """A run of the model that waits wherever the body of a ``with`` statement asks for an activation.

        The body is ordinary Python. ``run[name]`` lets the model go on to that hook point and returns the activation,
        a real tensor: what is changed in it in place, or assigned (``run[name] = x``), the model goes on with. Points
        are asked for in the model's order. The idea of writing interventions so is nnsight's (Fiotto-Kaufman et al.
        2024), whose later versions run the body in a greenlet, in strict turns with the model; here it is the model
        that runs in one, and the body stays in its own frame.

        Args:
            input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer, model_kwargs: as for
                `forward`.
            capture: hook points whose activations can be read in any order, and after the block.

        Returns:
            The trace, for a ``with`` statement.

        Raises:
            TypeError: an argument that neither the bridge nor the model knows, or an input of a wrong type.
            ValueError: a layer out of range, a prompt that is too long.
            UnknownHookError: a name that no hook point has.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.trace("When Mary and John went to the store, John gave a drink to") as run:
            ...     pattern = run["blocks.2.attn.hook_pattern"]
            ...     run["blocks.3.attn.hook_z"][:, :, 1] = 0
            >>> pattern.shape, run.logits.shape[0]
            (torch.Size([1, 4, 15, 15]), 1)
        """
        asked = Request(input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer, model_kwargs)
        return tracing.trace.Trace(self, self._model_order, asked, capture)

    def trace_generate(self, input: Input = "", **arguments: Any) -> tracing.generation.GenerationTrace:
        """A generation that waits wherever the body of a ``with`` statement asks for an activation.

        ``for step in run.steps`` goes through its steps, the prompt's first; ``step[name]`` is as ``run[name]`` in a
        trace, of that step. Edits that are made outside of the loop (``run[name][:, -1] = 0``, ``run[name] += v``,
        ``run[name] = x``) are made at every step.

        Args:
            input, arguments: as for `generate`, but for `return_type`, `return_cache`, `return_input_tokens`,
                `output_logits`, `names_filter` and `device`; `verbose` is off unless it is asked for.

        Returns:
            The generation, for a ``with`` statement; afterwards it has `tokens` and `text`.

        Raises:
            TypeError: an argument that nobody knows, or a model that does not generate.
            ValueError: no room in the context.

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
        self, body: tracing.edit.TraceBody, *, prompt: Input | None = None, points: Sequence[str] | None = None
    ) -> tracing.edit.Edit:
        """Turns the body of a trace, written as a function, into hooks for `hooks`, `run_with_hooks` and `generate`.

        In each forward pass (of a generation: in each step) the body runs once, in step with the model. A point that
        does not run is passed over, as a hook there would be.

        Args:
            body: called with what has activations by name: ``run[name]`` and ``run[name] = x``.
            prompt: what it is tried on, to find the hook points that it asks for; None: four tokens.
            points: these hook points, in place of trying.

        Returns:
            Pairs of a name and a function.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the body asks for nothing.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> def halve_if_large(run):
            ...     if run["blocks.1.hook_resid_post"].norm() > 1:
            ...         run["blocks.2.hook_mlp_out"] *= 0.5
            >>> edit = bridge.trace_edit(halve_if_large, points=["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out"])
            >>> with bridge.hooks(fwd_hooks=edit):
            ...     loss = bridge("Mary and John", return_type="loss")
        """
        if points is None:
            probe = torch.zeros(1, 4, dtype=torch.long) if prompt is None else prompt
            # The user's hooks see nothing of it.
            with torch.no_grad(), without_hooks(), self.trace(probe) as run:
                found = tracing.edit.points_asked_for(self.names, body, run)
        else:
            found = [self.names.find(name) for name in points]
        return tracing.edit.Edit(self.names, body, found)

    def shapes(self, input: Input, **forward_kwargs: Any) -> tracing.access.Shapes:
        """The shape and type of every activation, without computing one: from torch's fake tensors.

        Args:
            input, forward_kwargs: as for `forward`. The model may be on the meta device.

        Returns:
            By hook point, under all names. Where a number depends on values (how many tokens an expert is given), the
            shape has None. Points that this input does not come to are absent.

        Raises:
            RuntimeError: the model's own code asks for a value on its way.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.shapes("Mary and John")["blocks.2.attn.hook_pattern"]
            PointShape(shape=(1, 4, 4, 4), dtype=torch.float32)
        """
        return tracing.access.shapes(self, input, forward_kwargs)

    def save(self, x: T) -> T:
        """Returns `x`. Values of a trace are real tensors and stay: this is for code that comes from nnsight.

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
        """A run with captured activations and interventions as a plain module, to be compiled, exported, served.

        What hooks do is lowered into it once: its forward has no context and attaches nothing. Hooks that a run would
        see now (those that were added, those of an open ``with``) are part of it.

        Args:
            capture: which activations it returns: a name or alias, a list of them, a function of the name.
            interventions: pairs (hook points, function), as for `run_with_hooks`, or what `trace_edit` returns. A
                function is called as ``fn(activation, hook=point)``, and given the declared inputs that its signature
                names as keywords.
            inputs: the declared inputs by name, each with an example (a tensor, or a number): a steering vector, a
                strength, a value to be patched in, a mask over heads. Calls give them other values.

        Returns:
            A module: ``program(tokens, attention_mask=..., vector=...)`` returns a mapping from ``"logits"`` and each
            captured name to its tensor.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a hook point that no program can have; a model that reads images or sound before text; an input
                that no function takes; a filter that matches nothing.
            TypeError: a function that asks for an input which is not declared.

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
        pairs = [(hook, checked_function(hook, fn)) for names, fn in interventions for hook in self.select_hooks(names)]
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
        """A run with captured activations and interventions for another runtime, through transformers' exporters.

        Args:
            example: text, texts, tokens ``[batch, pos]``, or the model's arguments by name, as a tokenizer gives them.
                What it has is what the exported program takes, with the declared inputs.
            format: ``"dynamo"`` (`torch.export`), ``"onnx"``, ``"executorch"`` or ``"openvino"``.
            capture, interventions, inputs: as for `program`.
            dynamic, path, options: as for `Program.export`.

        Returns:
            transformers' `ExportedModel`: ``exported(input_ids=..., vector=...)`` runs it in its runtime and returns
            what the program returns.

        Raises:
            VersionError: transformers is older than 5.23.
            ImportError: the format needs something that is not installed; the error names the command.
            UnknownHookError, TypeError, ValueError: as for `program` and `Program.export`.
        """
        program = self.program(capture, interventions, inputs)
        if isinstance(example, str) or (isinstance(example, Sequence) and example and isinstance(example[0], str)):
            batch = self.batch_of([example] if isinstance(example, str) else example)
            mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
            example = {"input_ids": batch.tokens, "attention_mask": mask}
        elif not isinstance(example, Mapping):
            example = {"input_ids": as_tokens(example)}
        return program.export(example, format, dynamic=dynamic, path=path, **options)
