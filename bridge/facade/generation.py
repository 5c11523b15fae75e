"""Generating text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from bridge import generation, programs
from bridge.facade.hooks import HookMethods
from bridge.facade.tokens import TokenMethods
from bridge.facade.weights import WeightMethods
from bridge.hooks.context import CURRENT
from bridge.hooks.names import NamesFilter
from bridge.run.encoding import NAMES, unpacked
from bridge.run.protocol import HookSpec, Input


class GenerationMethods(HookMethods, WeightMethods, TokenMethods):
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
        program: programs.program.Program | None = None,
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
        return generation.generate.generate(
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
            output_logits: keep the logits of each new token.
            verbose: show a progress bar.

        Returns:
            An iterator of finished requests, in the order in which they finish. A request that fails says why in its
            `error`, and the others go on. Leaving the loop ends the generation.

        Raises:
            ValueError: a hook point whose tokens cannot be told apart by request, or that the model cannot do this.
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
        options = generation.batch.BatchOptions(
            max_new_tokens=max_new_tokens,
            capture=capture,
            stop_at_eos=stop_at_eos,
            eos_token_id=eos_token_id,
            sampling={"do_sample": do_sample, "top_k": top_k, "top_p": top_p, "temperature": temperature},
            output_logits=output_logits,
            verbose=verbose,
        )
        given = generation.batch.prompts_of(self, prompts, prepend_bos)
        return generation.batch.generate_batch(self, given, interventions, each, options)

    def hf_generate(
        self,
        input: Input = "",
        prepend_bos: bool | None = None,
        *,
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
        return generation.generate.hf_generate(self, input, prepend_bos, kwargs, return_type)

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
        return generation.stream.in_pieces(generation.stream.stream(self, input, dict(arguments)), max_tokens_per_yield)
