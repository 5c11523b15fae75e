"""Generating text: one thin layer over the model's own `generate`, so that every hook acts on every step of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from transformers import StoppingCriteriaList
from transformers.utils import ModelOutput

from bridge.cache.activation_cache import ActivationCache
from bridge.generation.criteria import Steps
from bridge.generation.options import Options, check_generates, prepared
from bridge.generation.prompt import (
    Generates,
    Prompt,
    aligned,
    check_return_type,
    is_as_text,
    prompt_of,
    rows_of,
    texts_of,
)
from bridge.generation.recorder import StepRecorder
from bridge.hooks.context import Generation, forward_pass
from bridge.run.compiled import uncompiled
from bridge.run.protocol import Input


def generate(bridge: Generates, input: Input, options: Options) -> Any:
    """Continues a prompt; see `TransformerBridge.generate`.

    Args:
        bridge: the bridge.
        input, options: as there.
    """
    check_return_type(options.return_type)
    prompt, arguments = prepared(bridge, input, options)
    as_text = is_as_text(options.return_type, prompt)
    if as_text and not options.output_logits:
        _ = bridge.tokenizer_facts  # an error now rather than after the generation
    recorder = _step_recorder(bridge, options, arguments) if options.return_cache else None
    if options.output_logits:
        arguments |= {"output_logits": True, "return_dict_in_generate": True}
    bar = tqdm(total=options.max_new_tokens, desc="generating", unit="token", disable=not options.verbose)
    generation = Generation()
    arguments["stopping_criteria"].append(Steps(bar, generation))
    recording = recorder.attached(bridge.wiring, bridge.core) if recorder else nullcontext()
    with bar, recording, generating(bridge, generation, prompt):
        made = run_generate(bridge.original_model, prompt, arguments)
    sequences = made["sequences"] if isinstance(made, ModelOutput) else made
    result: Any = None
    if options.output_logits:
        result = made
    elif options.return_type is not None:
        rows = rows_of(bridge, prompt, sequences, options.num_return_sequences)
        result = texts_of(bridge, rows, prompt) if as_text else aligned(rows, sequences, prompt)
    extras: list[Any] = []
    if recorder is not None:
        extras.append(ActivationCache(recorder.finish(), bridge))
    if options.return_input_tokens:
        extras.append(prompt.tokens)
    return (result, *extras) if extras else result


def hf_generate(bridge: Generates, input: Input, prepend_bos: bool | None, arguments: dict[str, Any]) -> Any:
    """The model's own `generate`; see `TransformerBridge.hf_generate`.

    Args:
        bridge: the bridge.
        input, prepend_bos: as there.
        arguments: of the model's `generate`.
    """
    check_generates(bridge)
    prompt = prompt_of(bridge, input, prepend_bos, None, arguments.pop("attention_mask", None))
    criteria = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
    generation = Generation()
    with generating(bridge, generation, prompt):
        arguments["stopping_criteria"] = [*criteria, Steps(tqdm(disable=True), generation)]
        return run_generate(bridge.original_model, prompt, arguments)


def run_generate(model: nn.Module, prompt: Prompt, arguments: dict[str, Any]) -> Any:
    """Calls the model's own `generate`."""
    generate: Any = model.generate  # nn.Module knows nothing of it
    return generate(**prompt.kwargs, **arguments)


@contextmanager
def generating(bridge: Generates, generation: Generation, prompt: Prompt) -> Iterator[None]:
    """A generation from a prompt: a run of its own, whose steps `generation` counts from 0."""
    with (
        forward_pass(generation) as run,
        uncompiled(bridge.original_model) if bridge.wiring.listening else nullcontext(),
    ):
        run.take_embeddings(bridge.core, prompt.kwargs)
        yield


def _step_recorder(bridge: Generates, options: Options, arguments: dict[str, Any]) -> StepRecorder:
    refused = [name for name in ("assistant_model", "prompt_lookup_num_tokens") if arguments.get(name)]
    if (arguments.get("num_beams") or 1) > 1:
        refused.append("num_beams")
    if refused:
        raise ValueError(
            f"return_cache cannot be had with {', '.join(refused)}: tokens are processed there that do not stay in "
            "the sequence. Use run_with_cache on the finished sequence."
        )
    points = bridge.select_hooks(options.names_filter)
    encoder_decoder = bridge.core.config.is_encoder_decoder
    return StepRecorder(points, options.device, options.use_past_kv_cache, encoder_decoder)
