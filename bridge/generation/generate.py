"""Generating text: one thin layer over the model's own `generate`, so that every hook acts on every step of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.utils import ModelOutput

from bridge.cache.activation_cache import ActivationCache
from bridge.generation.criteria import FrequencyPenalty, Steps, StopStrings
from bridge.generation.recorder import StepRecorder
from bridge.hooks.hook_point import STATE
from bridge.hooks.modules import uncompiled
from bridge.hooks.names import NamesFilter, suggestion
from bridge.run.forward import Input
from bridge.run.model_inputs import accepted_arguments, input_device


@dataclass
class Prompt:
    """What generation starts from.

    Attributes:
        kwargs: the prompt as arguments of the model's `generate`.
        tokens: ``[batch, pos]``, with padding in front; None for embeddings.
        padding: how many tokens of padding stand before each row.
        to_the_right: the user wants padding behind the rows.
        kind: ``"str"``, ``"list"`` or ``"tokens"``: what the user passed.
    """

    kwargs: dict[str, Any]
    tokens: Tensor | None
    padding: list[int]
    to_the_right: bool
    kind: str


class GenerationMethods:
    """The methods of a bridge that generate."""

    original_model: Any
    core: Any
    tokenizer: Any
    cfg: Any
    names: Any
    wiring: Any

    @property
    def step(self) -> int | None:
        """Which step of a generation this is: 0 for the prompt, then 1, 2, ...; None outside of a generation."""
        return STATE.step

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
        stopping_criteria: Any = None,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        verbose: bool = True,
        **more: Any,
    ) -> Any:
        """Continues a prompt by the model's own `generate`. Hooks act on every step, the prompt's included.

        Arguments that are None are the model's own (its `generation_config`).

        Args:
            input: a text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``.
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
        given = {name: value for name, value in locals().items() if name != "self"}
        check_return_type(return_type)
        prompt, arguments = self._arguments(given)
        as_text = return_type == "str" or (return_type == "input" and prompt.kind != "tokens")
        if as_text and not output_logits:
            _ = self.tokenizer_facts  # type: ignore[attr-defined]
        recorder = None
        if return_cache:
            recorder = self._step_recorder(names_filter, device, use_past_kv_cache, arguments)
        if output_logits:
            arguments |= {"output_logits": True, "return_dict_in_generate": True}
        bar = tqdm(total=max_new_tokens, desc="generating", unit="token", disable=not verbose)
        arguments["stopping_criteria"].append(Steps(bar))
        with bar, self._generating(), recorder.attached(self.wiring, self.core) if recorder else _nothing():
            made = self.original_model.generate(**prompt.kwargs, **arguments)
        sequences = made["sequences"] if isinstance(made, ModelOutput) else made
        result: Any = None
        if output_logits:
            result = made
        elif return_type is not None:
            rows = self._rows(prompt, sequences, num_return_sequences)
            result = self._texts(rows, prompt) if as_text else self._aligned(rows, sequences, prompt)
        extras: list[Any] = []
        if recorder is not None:
            extras.append(ActivationCache(recorder.finish(), self))
        if return_input_tokens:
            extras.append(prompt.tokens)
        return (result, *extras) if extras else result

    def hf_generate(self, input: Input = "", prepend_bos: bool | None = None, **kwargs: Any) -> Any:
        """The model's own `generate`, with its own arguments and return values; hooks act on every step.

        Args:
            input: text, texts, tokens or embeddings, as for `generate`; texts are padded in front.
            prepend_bos: start texts with BOS.
            kwargs: passed on as they are.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.hf_generate("Mary and", max_new_tokens=3, do_sample=False).shape
            torch.Size([1, 6])
        """
        self._check_generates()
        prompt = self._prompt(input, prepend_bos, None, kwargs.pop("attention_mask", None))
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        with self._generating():
            steps = Steps(tqdm(disable=True))
            return self.original_model.generate(**prompt.kwargs, stopping_criteria=[*criteria, steps], **kwargs)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """A generation: a run of its own, whose steps are counted from 0."""
        before = STATE.step
        with STATE.fresh(), uncompiled(self.original_model) if self.wiring.listening else _nothing():
            STATE.step = 0
            try:
                yield
            finally:
                STATE.step = before

    def _check_generates(self) -> None:
        if not hasattr(self.core, "generate") or not self.core.can_generate():
            raise TypeError(f"{type(self.core).__name__} does not generate text: transformers gives it no `generate`")

    def _arguments(self, given: dict[str, Any]) -> tuple[Prompt, dict[str, Any]]:
        """The prompt, and the arguments of the model's `generate` besides, from those of ours."""
        self._check_generates()
        more = dict(given["more"])
        self._check_known(more)
        mask = more.pop("attention_mask", None)
        prompt = self._prompt(given["input"], given["prepend_bos"], given["padding_side"], mask)
        if prompt.tokens is not None and "attention_mask" not in prompt.kwargs:
            prompt.kwargs["attention_mask"] = self._inferred_mask(prompt.tokens, given["eos_token_id"], more)
        self._check_room(prompt, given["max_new_tokens"])
        arguments: dict[str, Any] = {"max_new_tokens": given["max_new_tokens"], "do_sample": given["do_sample"], **more}
        for name in ("top_k", "top_p", "temperature", "repetition_penalty"):
            if given[name] is not None:
                arguments[name] = given[name]
        if given["num_return_sequences"] != 1:
            arguments["num_return_sequences"] = given["num_return_sequences"]
        if not given["use_past_kv_cache"]:
            arguments["use_cache"] = False
        arguments |= self._ending(given["stop_at_eos"], given["eos_token_id"], more)
        if given["freq_penalty"]:
            processors = LogitsProcessorList(arguments.pop("logits_processor", None) or [])
            arguments["logits_processor"] = LogitsProcessorList([*processors, FrequencyPenalty(given["freq_penalty"])])
        criteria = given["stopping_criteria"]
        single = isinstance(criteria, StoppingCriteria)
        arguments["stopping_criteria"] = StoppingCriteriaList([criteria] if single else list(criteria or []))
        if given["stop_strings"] is not None:
            tokenizer = self.tokenizer_facts.tokenizer  # type: ignore[attr-defined]
            arguments["stopping_criteria"].append(StopStrings(given["stop_strings"], tokenizer))
        return prompt, arguments

    def _inferred_mask(self, tokens: Tensor, eos_token_id: Any, more: dict[str, Any]) -> Tensor:
        """What `generate` takes for padding in tokens without a mask: padding tokens, unless they also end a text.

        It is said here because not stopping at EOS, which hides EOS from `generate`, must not make padding of it.
        """
        own = self.core.generation_config
        pad = more.get("pad_token_id", own.pad_token_id)
        eos = own.eos_token_id if eos_token_id is None else eos_token_id
        endings = set(eos) if isinstance(eos, Sequence) else {eos}
        padded = pad is not None and pad not in endings
        return (tokens != pad).long() if padded else torch.ones_like(tokens)

    def _ending(self, stop_at_eos: bool, eos_token_id: Any, more: dict[str, Any]) -> dict[str, Any]:
        """What ends a row, and what fills it up afterwards."""
        given: dict[str, Any] = {}
        if eos_token_id is not None:
            given["eos_token_id"] = list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id
        own = self.core.generation_config
        eos = given.get("eos_token_id", own.eos_token_id)
        if own.pad_token_id is None and "pad_token_id" not in more and eos is not None:
            given["pad_token_id"] = (
                eos[0] if isinstance(eos, list) else eos
            )  # as transformers would, without its notice
        if not stop_at_eos:
            given["eos_token_id"] = None
        return given

    def _check_known(self, more: dict[str, Any]) -> None:
        known = set(vars(GenerationConfig())) | set(inspect.signature(type(self.core).generate).parameters)
        known |= accepted_arguments(type(self.core).forward)
        known -= {"self", "inputs", "kwargs", "generation_config", "input_ids", "inputs_embeds"}
        for name in more:
            if name not in known:
                ours = inspect.signature(type(self).generate).parameters
                raise TypeError(
                    f"{name!r} is an argument of neither generate nor GenerationConfig nor "
                    f"{type(self.core).__name__}.{suggestion(name, (*ours, *known))}"
                )

    def _check_room(self, prompt: Prompt, max_new_tokens: int) -> None:
        if self.cfg.n_ctx is None or self.core.config.is_encoder_decoder:
            return
        length = next(iter(prompt.kwargs.values())).shape[1] - min(prompt.padding, default=0)
        if length + max_new_tokens > self.cfg.n_ctx:
            raise ValueError(
                f"the prompt has {length} tokens and max_new_tokens={max_new_tokens}; {self.cfg.model_name} has a "
                f"context of {self.cfg.n_ctx}: there is room for {max(0, self.cfg.n_ctx - length)} new tokens"
            )

    def _prompt(self, input: Any, prepend_bos: Any, padding_side: Any, mask: Tensor | None) -> Prompt:
        """The prompt with padding in front, where generation needs it."""
        where = input_device(self.core)
        if padding_side not in (None, "left", "right"):
            raise ValueError(f'padding_side is {padding_side!r}; it must be "left" or "right"')
        if isinstance(input, Tensor) and input.is_floating_point():
            embeddings = {"inputs_embeds": (input if input.ndim == 3 else input[None]).to(where)}
            mask_too = {} if mask is None else {"attention_mask": mask.to(where)}
            return Prompt(embeddings | mask_too, None, [0] * input.shape[0], False, "tokens")
        text = isinstance(input, str)
        if text or (isinstance(input, list | tuple) and input and isinstance(input[0], str)):
            batch = self.batch_of([input] if text else input, prepend_bos, "left")  # type: ignore[attr-defined]
            tokens, mask, kind = batch.tokens, batch.mask, "str" if text else "list"
            if mask is None and len(tokens):
                # Without it transformers would take a padding token for one that is not meant.
                mask = torch.ones_like(tokens)
        else:
            from bridge.run.model_inputs import as_tokens

            tokens, kind = as_tokens(input), "tokens"
            if padding_side is None and mask is not None and bool((mask[:, -1] == 0).any()):
                padding_side = "right"
            tokens, mask = to_the_left(tokens, mask)
        if tokens.shape[1] == 0:
            raise ValueError("the prompt has no tokens")
        kwargs = {"input_ids": tokens.to(where)}
        if mask is not None:
            kwargs["attention_mask"] = mask.to(where)
        padding = [0] * len(tokens) if mask is None else (mask.cumsum(-1) == 0).sum(-1).tolist()
        return Prompt(kwargs, kwargs["input_ids"], padding, padding_side == "right", kind)

    def _step_recorder(self, names: NamesFilter, device: Any, caching: bool, arguments: dict[str, Any]) -> StepRecorder:
        refused = [name for name in ("assistant_model", "prompt_lookup_num_tokens") if arguments.get(name)]
        if (arguments.get("num_beams") or 1) > 1:
            refused.append("num_beams")
        if refused:
            raise ValueError(
                f"return_cache cannot be had with {', '.join(refused)}: tokens are processed there that do not stay in "
                "the sequence. Use run_with_cache on the finished sequence."
            )
        points = self.names.select(names, self._is_heavy_on)  # type: ignore[attr-defined]
        return StepRecorder(points, device, caching, self.core.config.is_encoder_decoder)

    def _rows(self, prompt: Prompt, sequences: Tensor, copies: int) -> list[Tensor]:
        """Each row without the padding in front of it."""
        if self.core.config.is_encoder_decoder or prompt.tokens is None:
            return list(sequences)
        return [row[prompt.padding[i // copies] :] for i, row in enumerate(sequences)]

    def _texts(self, rows: Sequence[Tensor], prompt: Prompt) -> str | list[str]:
        texts = [self._decode(row.tolist()) for row in rows]
        return texts[0] if prompt.kind == "str" and len(texts) == 1 else texts

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer = self.tokenizer_facts.tokenizer  # type: ignore[attr-defined]
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _aligned(self, rows: Sequence[Tensor], sequences: Tensor, prompt: Prompt) -> Int[Tensor, "batch pos"]:
        """The sequences, with the padding of the prompt on the side that was asked for."""
        if not prompt.to_the_right:
            return sequences
        # The prompt's own padding moves from the front to the back.
        fills = [sequence[: len(sequence) - len(row)] for sequence, row in zip(sequences, rows, strict=True)]
        return torch.stack([torch.cat([row, fill]) for row, fill in zip(rows, fills, strict=True)])


def check_return_type(return_type: Any) -> None:
    """Refuses what `generate` cannot return.

    Raises:
        ValueError: it is none of the known ones.
    """
    if return_type not in ("input", "str", "tokens", None):
        raise ValueError(f'return_type is {return_type!r}; it must be "input", "str", "tokens" or None')


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def to_the_left(
    tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"] | None
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"] | None]:
    """Rows with their padding moved to the front, where generation needs it.

    Args:
        tokens: the rows.
        mask: 1 for tokens and 0 for padding; None: no padding.

    Raises:
        ValueError: the mask does not fit.
    """
    if mask is None:
        return tokens, None
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; the tokens have {list(tokens.shape)}")
    # A stable sort by the mask keeps the tokens' order, and that of the padding.
    order = mask.to(torch.int8).argsort(dim=-1, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)
