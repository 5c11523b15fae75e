"""Generating text: one thin layer over the model's own `generate`, so that every hook acts on every step of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import StoppingCriteriaList
from transformers.utils import ModelOutput

from adapters.inputs.arguments import accepted_arguments
from adapters.paths import core_path
from bridge.cache.activation_cache import ActivationCache
from bridge.generation.criteria import Steps
from bridge.generation.options import GenerationOptions, check_generates, check_plain_loop, prepared
from bridge.generation.prompt import (
    Arguments,
    Generates,
    GenerationPrompt,
    aligned,
    check_return_type,
    is_as_text,
    prompt_of,
    rows_of,
    texts_of,
)
from bridge.generation.recorder import StepRecorder
from bridge.hooks.context import Generation, forward_pass
from bridge.hooks.modules import Finder
from bridge.hooks.names import named_one_by_one
from bridge.run.protocol import Input
from bridge.run.tokenization import TextOptions
from bridge.wiring.compiled import call_eagerly, forced_eager

#: Options of the model's `generate` with which it processes tokens that do not stay in the sequence.
_OTHER_RUNS = (
    "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers",
    "custom_generate", "use_mtp",
)  # fmt: skip


def generate(bridge: Generates, input: Input, options: GenerationOptions, program: nn.Module | None = None) -> Any:
    """Continues a prompt; see `TransformerBridge.generate`.

    Args:
        bridge: the bridge.
        input, options: as there.
        program: what has `generate` in the model's place.
    """
    if program is not None and options.return_cache:
        raise ValueError("return_cache cannot be had with a program: what it captures is not kept for each step")
    check_return_type(options.return_type)
    prompt, arguments = prepared(bridge, input, options)
    as_text = is_as_text(options.return_type, prompt)
    if as_text and not options.output_logits:
        _ = bridge.tokenizer_facts  # an error now rather than after the generation
    recorder = _step_recorder(bridge, options, arguments) if options.return_cache else None
    if options.output_logits:
        arguments |= {"output_logits": True, "return_dict_in_generate": True}
    bar = tqdm(total=options.max_new_tokens, desc="generating", unit="token", disable=not options.verbose)
    generation = generation_of(bridge, prompt, arguments)
    arguments["stopping_criteria"].append(Steps(bar, generation))
    recording = recorder.attached(bridge.wiring, bridge.core) if recorder else nullcontext()
    with bar, recording, generating(bridge, generation, prompt):
        made = run_generate(bridge, prompt, arguments, program)
    sequences = made["sequences"] if isinstance(made, ModelOutput) else made
    result: Any = None
    if options.output_logits:
        result = made
    elif options.return_type is not None:
        rows = rows_of(bridge, prompt, sequences, options.num_return_sequences)
        result = texts_of(bridge, rows, prompt) if as_text else aligned(rows, sequences, prompt)
    extras: list[Any] = []
    if recorder is not None:
        before = 0 if prompt.tokens is not None or recorder.pos != "pos" else prompt.kwargs["inputs_embeds"].shape[1]
        explicit = named_one_by_one(options.names_filter)
        values = recorder.finish(before + sequences.shape[1] - 1, explicit)
        if result is not None and not as_text and not options.output_logits and prompt.to_the_right:
            copies = options.num_return_sequences
            values = recorder.behind(values, [prompt.padding[i // copies] for i in range(len(sequences))])
        extras.append(ActivationCache(values, bridge))
    if options.return_input_tokens:
        extras.append(prompt.tokens)
    return (result, *extras) if extras else result


def hf_generate(
    bridge: Generates,
    input: Input,
    prepend_bos: bool | None,
    arguments: dict[str, Any],
    return_type: str | None = None,
) -> Any:
    """The model's own `generate`; see `TransformerBridge.hf_generate`.

    Args:
        bridge: the bridge.
        input, prepend_bos: as there.
        arguments: of the model's `generate`.
        return_type: as there.
    """
    check_return_type(return_type)
    check_generates(bridge)
    prompt = prompt_of(bridge, input, TextOptions(prepend_bos), arguments.pop("attention_mask", None))
    criteria = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
    generation = generation_of(bridge, prompt, arguments)
    with generating(bridge, generation, prompt):
        arguments["stopping_criteria"] = [*criteria, Steps(tqdm(disable=True), generation)]
        made = run_generate(bridge, prompt, arguments)
    sequences = made if isinstance(made, Tensor) else made.sequences
    if return_type == "str" or (return_type == "input" and prompt.kind != "tokens"):
        copies = max(1, len(sequences) // max(1, len(prompt.padding)))
        return texts_of(bridge, rows_of(bridge, prompt, sequences, copies), prompt)
    return made if return_type is None else sequences


def run_generate(
    bridge: Generates, prompt: GenerationPrompt, arguments: dict[str, Any], program: nn.Module | None = None
) -> Any:
    """Calls the model's own `generate`, or that of a program."""
    random = bool(chosen(bridge, arguments, "do_sample"))
    bridge.wiring.check_all_alike([prompt.kwargs, arguments.get("max_new_tokens")], random)
    model = program or bridge.original_model
    generate: Any = model.generate  # nn.Module knows nothing of it
    if bridge.wiring.listening and program is None:
        return call_eagerly(model, generate, (), {**prompt.kwargs, **arguments})
    return generate(**prompt.kwargs, **arguments)


def generation_of(bridge: Generates, prompt: GenerationPrompt, arguments: Arguments) -> Generation:
    """A generation from a prompt, of which is known where in the sequence each step is.

    Args:
        bridge, prompt: the bridge, and what it starts from.
        arguments: of the model's `generate`.
    """
    of_decoder = bridge.core.config.is_encoder_decoder
    given = prompt.tokens if prompt.tokens is not None else prompt.kwargs.get("inputs_embeds")
    if of_decoder:
        given = arguments.get("decoder_input_ids", prompt.kwargs.get("decoder_input_ids"))
    if given is None:
        length = 1 if of_decoder else None  # the token that a decoder starts with
    else:
        length = given.shape[1]
    in_order = not any(chosen(bridge, arguments, name) for name in (*_OTHER_RUNS, "prefill_chunk_size"))
    return Generation(length, () if of_decoder else prompt.padding, of_decoder, in_order)


def chosen(bridge: Generates, arguments: Arguments, name: str) -> Any:
    """An argument of the model's `generate`: as it was given, or else as the model's own configuration says."""
    return arguments[name] if name in arguments else getattr(bridge.core.generation_config, name, None)


@contextmanager
def generating(bridge: Generates, generation: Generation, prompt: GenerationPrompt) -> Iterator[None]:
    """A generation from a prompt: a run of its own, whose steps `generation` counts from 0."""
    if bridge.wiring.listening:
        bridge.wiring.check_in_place()
    find = Finder(bridge.original_model, core_path(bridge.original_model))
    with forward_pass(generation) as run, forced_eager(find) if bridge.wiring.listening else nullcontext():
        run.gradients = False
        run.take_arguments(bridge.core, prompt.kwargs)
        yield


def _step_recorder(bridge: Generates, options: GenerationOptions, arguments: dict[str, Any]) -> StepRecorder:
    _refuse_other_runs(bridge, arguments)
    points = bridge.select_hooks(options.names_filter)
    known = accepted_arguments(type(bridge.core).forward)
    if "logits_to_keep" in known and any(point.name.startswith("unembed") for point in points):
        arguments.setdefault("logits_to_keep", 0)  # of every token: `generate` would ask for the prompt's last
    caching = chosen(bridge, arguments, "use_cache") is not False
    if caching and bridge.cfg.attention_dir == "bidirectional" and not bridge.core.config.is_encoder_decoder:
        raise ValueError(
            f"return_cache cannot be had for {bridge.cfg.model_name}, which reads in both directions: what a step "
            "computes for a token changes with the tokens behind it. Use run_with_cache on the finished sequence, or "
            "use_past_kv_cache=False."
        )
    rows = [point.name for point in points if "row" in point.point.axes.split()]
    if rows and caching:
        raise ValueError(
            f"return_cache cannot be had for {', '.join(rows[:3])}: the rows of an expert at each step do not make "
            "those of the sequence. Use run_with_cache on the finished sequence, or use_past_kv_cache=False."
        )
    return StepRecorder(points, options.device, caching, bridge.core.config.is_encoder_decoder)


def _refuse_other_runs(bridge: Generates, arguments: Arguments) -> None:
    """Refuses to keep activations where the model runs on other tokens than those of the sequence, one by one.

    Raises:
        ValueError: it does.
    """
    check_plain_loop(bridge, "return_cache", "Use run_with_cache on the finished sequence")
    refused = [name for name in _OTHER_RUNS if chosen(bridge, arguments, name)]
    refused += [name for name in ("num_beams", "guidance_scale") if (chosen(bridge, arguments, name) or 1) != 1]
    if refused:
        raise ValueError(
            f"return_cache cannot be had with {', '.join(refused)}: tokens are processed there that do not stay in "
            "the sequence. Use run_with_cache on the finished sequence."
        )
    if arguments.get("past_key_values") is not None:
        raise ValueError(
            "return_cache cannot be had with past_key_values: what was computed before is not seen again. Generate "
            "from the whole prompt, or use run_with_cache on the finished sequence."
        )
