"""How to generate: from a user's arguments to those of the model's own `generate`."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from adapters.inputs.arguments import accepted_arguments, takes
from bridge.generation.criteria import FrequencyPenalty, StopStrings
from bridge.generation.prompt import Arguments, Generates, GenerationPrompt, prompt_of
from bridge.hooks.arguments import check_types
from bridge.hooks.names import NamesFilter, suggestion
from bridge.run.model_inputs import TAKEN_BY
from bridge.run.protocol import Input
from bridge.run.tokenization import TextOptions


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The arguments of `TransformerBridge.generate` but for the prompt, with the same meaning and defaults."""

    max_new_tokens: int = 10
    stop_at_eos: bool = True
    eos_token_id: int | Sequence[int] | None = None
    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    freq_penalty: float = 0.0
    repetition_penalty: float | None = None
    num_return_sequences: int = 1
    use_past_kv_cache: bool = True
    prepend_bos: bool | None = None
    padding_side: str | None = None
    return_type: str | None = "input"
    output_logits: bool = False
    return_cache: bool = False
    return_input_tokens: bool = False
    stop_strings: str | Sequence[str] | None = None
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None = None
    names_filter: NamesFilter = None
    device: torch.device | str | None = None
    verbose: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GenerationOptions:
        """From keyword arguments, of which those that are none of ours are `more`."""
        ours = _hints()
        known = {name: value for name, value in arguments.items() if name in ours}
        check_types("generate", known, ours)
        if known.get("max_new_tokens", 1) < 1:
            raise ValueError(f"max_new_tokens is {known['max_new_tokens']}; it must be 1 or more")
        return cls(**known, more={name: value for name, value in arguments.items() if name not in ours})


@functools.cache
def _hints() -> dict[str, Any]:
    """What annotations say of each argument but `more`."""
    return {name: hint for name, hint in typing.get_type_hints(GenerationOptions).items() if name != "more"}


def check_generates(bridge: Generates) -> None:
    """Refuses a model that does not generate.

    Raises:
        TypeError: it does not.
    """
    if not hasattr(bridge.core, "generate") or not bridge.core.can_generate():
        raise TypeError(f"{type(bridge.core).__name__} does not generate text: transformers gives it no `generate`")


def check_plain_loop(bridge: Generates, wanted: str, instead: str) -> None:
    """Refuses what needs the steps of a generation to be those of its tokens, where images or sound are made text of.

    Raises:
        ValueError: the class has a `generate` of its own for that.
    """
    own, taken = type(bridge.core), takes(bridge.core)
    if (taken.main is not None or taken.needed) and getattr(own, "generate", None) is not GenerationMixin.generate:
        raise ValueError(
            f"{wanted} cannot be had of {own.__name__}, whose `generate` is its own: it may run the model more often "
            f"than there are tokens, and leave some out. {instead}."
        )


def prepared(bridge: Generates, input: Input, options: GenerationOptions) -> tuple[GenerationPrompt, Arguments]:
    """The prompt, and the arguments of the model's `generate` besides.

    Args:
        bridge: the bridge.
        input: as for `TransformerBridge.generate`.
        options: likewise.

    Raises:
        TypeError: an argument that nobody knows, or a model that does not generate.
        ValueError: no room in the context, or an input that does not fit.
    """
    check_generates(bridge)
    more = dict(options.more)
    _check_known(bridge, more)
    _check_used(options, more)
    text = TextOptions(options.prepend_bos, options.padding_side)
    prompt = prompt_of(bridge, input, text, more.pop("attention_mask", None))
    if prompt.tokens is not None and "input_ids" in prompt.kwargs and "attention_mask" not in prompt.kwargs:
        prompt.kwargs["attention_mask"] = inferred_mask(bridge, prompt.tokens, options.eos_token_id, more)
    _check_room(bridge, prompt, options.max_new_tokens)
    arguments: Arguments = {"max_new_tokens": options.max_new_tokens, "do_sample": options.do_sample, **more}
    for name in ("top_k", "top_p", "temperature", "repetition_penalty"):
        if getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    arguments["num_return_sequences"] = options.num_return_sequences  # whatever the model's own configuration says
    if not options.use_past_kv_cache:
        arguments["use_cache"] = False
    arguments |= _ending(bridge, options, more)
    if options.freq_penalty:
        processors = arguments.pop("logits_processor", None) or []
        arguments["logits_processor"] = LogitsProcessorList([*processors, FrequencyPenalty(options.freq_penalty)])
    criteria = options.stopping_criteria
    several = [criteria] if isinstance(criteria, StoppingCriteria) else list(criteria or [])
    arguments["stopping_criteria"] = StoppingCriteriaList(several)
    if options.stop_strings is not None:
        arguments["stopping_criteria"].append(StopStrings(options.stop_strings, bridge.tokenizer_facts.tokenizer))
    return prompt, arguments


def inferred_mask(
    bridge: Generates, tokens: Tensor, eos_token_id: int | Sequence[int] | None, more: Arguments
) -> Tensor:
    """The mask of tokens that are given without one: all of them count, as in a forward pass.

    It is said here because not stopping at EOS, which hides EOS from `generate`, must not make padding of it.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.
        eos_token_id: what ends a row; None: what the model's configuration says.
        more: the arguments of the model's `generate`, which may say what padding is.

    Raises:
        ValueError: there are padding tokens: a forward pass reads them as tokens, and `generate` would not.
    """
    own = bridge.core.generation_config
    pad = more.get("pad_token_id", own.pad_token_id)
    eos = own.eos_token_id if eos_token_id is None else eos_token_id
    endings = set(eos) if isinstance(eos, Sequence) else {eos}
    padded = pad is not None and pad not in endings
    if padded and bool((tokens == pad).any()):
        raise ValueError(
            f"the tokens hold the padding token {pad}, and nothing says whether it is padding: pass attention_mask "
            "[batch, pos], 1 for tokens and 0 for padding"
        )
    return torch.ones_like(tokens)


def _ending(bridge: Generates, options: GenerationOptions, more: Arguments) -> Arguments:
    """What ends a row, and what fills it up afterwards."""
    given: Arguments = {}
    ending = options.eos_token_id
    if ending is not None:
        given["eos_token_id"] = list(ending) if isinstance(ending, Sequence) else ending
    own = bridge.core.generation_config
    eos = given.get("eos_token_id", own.eos_token_id)
    if own.pad_token_id is None and "pad_token_id" not in more and eos is not None:
        given["pad_token_id"] = eos[0] if isinstance(eos, list) else eos  # as transformers would, without its notice
    if not options.stop_at_eos:
        given["eos_token_id"] = None
    return given


def _check_known(bridge: Generates, more: Arguments) -> None:
    known = set(vars(GenerationConfig()))
    own: Any = type(bridge.core)  # of which `check_generates` has seen that it generates
    known |= set(inspect.signature(own.generate).parameters)
    known |= accepted_arguments(type(bridge.core).forward)
    known -= {"self", "inputs", "kwargs", "generation_config", "input_ids", "inputs_embeds"}
    for name in more:
        if name == "generation_config":
            raise TypeError(
                "generation_config is not taken together with the arguments of generate, which might contradict it: "
                "give what it says as arguments, set it on the model (hf_model.generation_config), or use hf_generate"
            )
        if name not in known and name in TAKEN_BY:
            raise TypeError(f"{name!r} is no argument of generate: {TAKEN_BY[name]}")
        if name not in known:
            ours = ["input", *_hints(), "more"]
            raise TypeError(
                f"{name!r} is an argument of neither generate nor GenerationConfig nor "
                f"{type(bridge.core).__name__}.{suggestion(name, (*ours, *known))}"
            )


def _check_used(options: GenerationOptions, more: Mapping[str, Any]) -> None:
    """Refuses arguments that would be taken and have no effect.

    Raises:
        ValueError: there is one.
    """
    if more.get("max_length") is not None:
        raise ValueError(
            f"max_length={more['max_length']} would have no effect together with "
            f"max_new_tokens={options.max_new_tokens}: "
            "say with max_new_tokens how many tokens to make"
        )
    for name in ("return_dict_in_generate", "output_scores", "output_attentions", "output_hidden_states"):
        if more.get(name) and not options.output_logits:
            raise ValueError(
                f"{name}=True is of transformers' own result: use output_logits=True, which returns it, or hf_generate"
            )
    if not options.return_cache:
        for name in ("names_filter", "device"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{name} is of the cache of activations, and none was asked for: add return_cache=True"
                )


def _check_room(bridge: Generates, prompt: GenerationPrompt, max_new_tokens: int) -> None:
    cfg = bridge.cfg
    if cfg.n_ctx is None or bridge.core.config.is_encoder_decoder:
        return
    length = next(iter(prompt.kwargs.values())).shape[1] - min(prompt.padding)
    if length + max_new_tokens > cfg.n_ctx:
        raise ValueError(
            f"the prompt has {length} tokens and max_new_tokens={max_new_tokens}; {cfg.model_name} has a "
            f"context of {cfg.n_ctx}: there is room for {max(0, cfg.n_ctx - length)} new tokens"
        )
