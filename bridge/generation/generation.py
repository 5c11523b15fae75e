"""Generating text: a thin layer over the model's own `generate`, with hooks at every step."""

from __future__ import annotations

import contextvars
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.generation import BaseStreamer
from transformers.utils import ModelOutput

from adapters.inputs import accepted_arguments, accepted_by, past_of, with_past_named
from adapters.points import core_path
from adapters.spread import refuse_context_parallel
from adapters.tuners import no_hooks_of_rows_left, tells_layers_of_rows
from adapters.views import Args, Deferred, Kwargs
from bridge.arguments import check_positive, listed
from bridge.cache import ActivationCache
from bridge.generation.options import (
    GenerationOptions,
    GenerationPrompt,
    Steps,
    aligned,
    check_generates,
    check_plain_loop,
    check_return_type,
    decode,
    is_as_text,
    of_prompt,
    prepared,
    prompt_of,
    rows_of,
    texts_of,
    warn_of_rows,
)
from bridge.generation.packed import with_unseen_keys
from bridge.hooks.context import CURRENT, Generation, forward_pass
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import named_one_by_one
from bridge.interventions.probes import FittedProbe, ProbeReading, probes_at, readings_of
from bridge.modules import Finder
from bridge.rows import BatchRows
from bridge.run.inputs import Input, RunnableBridge
from bridge.run.recorder import ActivationRecorder
from bridge.run.rotary import own_factors
from bridge.run.tokenization import TextOptions
from bridge.wiring.compiled import call_eagerly, forced_eager
from bridge.wiring.wiring import Wiring

# --------------------------------------------------------------------------------------------------
# Recording the activations of a generation, step by step.
# --------------------------------------------------------------------------------------------------


_logger = logging.getLogger(__name__)


class StepRecorder(ActivationRecorder):
    """Recorder of the activations at every step, which joins the steps.

    Args:
        points: the hook points.
        device: the device on which to keep activations; None: their own.
        caching: whether the model keeps keys and values, so that each step processes only new
            tokens.
        encoder_decoder: whether the growing sequence is the decoder's.
    """

    def __init__(
        self,
        points: Sequence[HookPoint],
        device: torch.device | str | None,
        caching: bool,
        encoder_decoder: bool,
    ) -> None:
        super().__init__(points, device=device)
        self.caching = caching
        self.pos = "pos"
        self.key_pos = "key_pos"
        if encoder_decoder:
            self.pos = "decoder_pos"
            self.key_pos = "decoder_key_pos"
        self.seen = 0  # tokens before the present step
        self.new = 0  # tokens of the present step
        self.steps = 0  # whose activations are kept
        self._parts: dict[HookPoint, list[Tensor]] = {}
        self._from_start: set[HookPoint] = set()  # ran at the prompt
        #: Points whose rows at each step are not those of the sequence: they are not kept.
        rows = [point for point in points if caching and "row" in point.point.axes.split()]
        self.in_rows = dict.fromkeys(rows)

    as_shown = False

    @property
    def total(self) -> int:
        """Return the number of tokens so far."""
        return self.seen + self.new

    @contextmanager
    def at_each_step(self, wiring: Wiring, core: nn.Module) -> Iterator[None]:
        """Listen in the generation that starts inside the ``with`` statement."""
        with self.attached(wiring) as scope:
            # Without kwargs where the hook is added or removed during another thread's pass.
            def begin(module: nn.Module, args: Any, kwargs: Any = None) -> None:
                if kwargs is not None and scope in CURRENT.get().visible:
                    self._begin(args, kwargs)

            handle = core.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
            try:
                yield
            finally:
                handle.remove()

    def _begin(self, args: Args, kwargs: Kwargs) -> None:
        names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
        inputs = [*args[:1], *(kwargs[name] for name in names if kwargs.get(name) is not None)]
        self.seen = self.total if self.caching else 0
        self.new = inputs[0].shape[1]
        self.steps += 1
        if not self.caching:
            self.steps = 1
            self._parts.clear()  # this step processes everything again
            self.versions.clear()

    def read(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Keep the step's new entries of an activation."""
        if hook in self.in_rows:
            return
        act = act.value(hook.name) if isinstance(act, Deferred) else act.detach()
        axes = hook.point.axes.split()
        if self.key_pos in axes:
            act = self._fit_keys(act, axes, hook)
        if self.pos in axes:
            act = self._fit_positions(act, axes.index(self.pos), hook)
        kept = self.noted(act if self.device is None else act.to(self.device), hook)
        self._parts.setdefault(hook, []).append(kept)
        if not self.seen:
            self._from_start.add(hook)

    def _fit_keys(self, act: Tensor, axes: Sequence[str], hook: HookPoint) -> Tensor:
        """Return an activation restricted to the keys of the sequence so far, or to the new
        keys."""
        axis = axes.index(self.key_pos)
        keys = act.shape[axis]
        if self.pos not in axes:  # keys and values of the whole past, of which the last are new
            return self._newest(act, axis)
        if keys < self.total:  # a sliding window that has moved on
            return with_unseen_keys(act, axis, (self.total - keys, 0), hook)
        return act.narrow(axis, 0, self.total)  # a cache of fixed size has more

    def _fit_positions(self, act: Tensor, axis: int, hook: HookPoint) -> Tensor:
        """Return an activation without past positions (keys from a latent have them)."""
        positions = act.shape[axis]
        if positions <= self.new:
            return act
        if positions < self.total and ".attn." not in hook.name:  # no window of keys
            raise ValueError(
                f"{hook.name} has {positions} positions in a step of {self.new} after"
                f" {self.seen} tokens: its steps cannot be joined. Generate the rows one by one"
                " (transformers' RWKV mixes the rows of a batch), or use run_with_cache on the"
                " finished sequence"
            )
        return self._newest(act, axis)

    def _newest(self, act: Tensor, axis: int) -> Tensor:
        """Return the current step's part of an activation that covers the whole past."""
        size = act.shape[axis]
        start = self.seen if size >= self.total else size - self.new
        return act.narrow(axis, start, self.new).clone()

    def given_back(
        self, values: dict[str, Tensor], rows: BatchRows, behind: bool
    ) -> dict[str, Tensor]:
        """Return the activations with each token at the user's position.

        Args:
            values: the activations, by canonical name.
            rows: the positions of the prompt's rows.
            behind: whether the user's sequences are right-padded, as the returned tokens are.
        """
        axes = {hook.name: hook.point.axes for hook in self.points}
        return {
            name: rows.given_back(value, axes[name].split(), behind)
            for name, value in values.items()
        }

    def _put_together(self, hook: HookPoint) -> Tensor | str:
        """Return the steps of a hook point as one activation, or the reason why they cannot be
        joined."""
        if hook in self.in_rows:
            return "has rows of each step, which do not make those of the sequence"
        if hook not in self._from_start:
            return "did not run on this prompt"
        total = self.total
        parts = self._parts[hook]
        axes = hook.point.axes.split()
        growing = next((axis for axis in (self.pos, self.key_pos) if axis in axes), None)
        if growing is None:
            return self._last(parts, axes)
        if self.pos in axes and self.key_pos in axes:
            axis = axes.index(self.key_pos)
            for i, part in enumerate(parts):
                parts[i] = with_unseen_keys(part, axis, (0, total - part.shape[axis]), hook)
        if "held_pos" in axes and len(parts) > 1:
            return "is of keys that stand for several tokens, which are others in each step"
        axis = axes.index(growing)
        activation = torch.cat(parts, dim=axis)
        length = activation.shape[axis]
        return activation if length == total else f"was computed at {length} of {total} tokens"

    def _last(self, parts: Sequence[Tensor], axes: Sequence[str]) -> Tensor | str:
        """Return the last step of an activation without positions, if every step has all of it."""
        of_encoder = any("pos" in axis for axis in axes)  # which runs once
        changes = len(parts) < self.steps or len({part.shape for part in parts}) > 1
        if changes and not of_encoder:
            return "has no axis of positions, and is no state that each step makes anew"
        return parts[-1]

    def put_together(self, processed: int, explicit: bool) -> dict[str, Tensor]:
        """Return the activations of every processed token, by canonical name.

        Hook points are omitted if they did not run on the prompt (the embedding's, if embeddings
        were passed), or if their steps cannot be joined (a convolution that runs only on the
        prompt).

        Args:
            processed: how many tokens of each row the model must have processed.
            explicit: whether the hook points were named one by one, so that none may be missing.

        Raises:
            ValueError: the model processed a different number of tokens.
            RuntimeError: a named point is missing; or an activation was changed in place after it
                was recorded.
        """
        if self.total != processed:
            raise ValueError(
                f"the steps of this generation processed {self.total} tokens, and its sequence has"
                f" {processed} that should have been: use run_with_cache on the finished sequence"
            )
        self.check_unchanged()
        values: dict[str, Tensor] = {}
        names_by_reason: dict[str, list[str]] = {}
        for hook in self.points:
            value = self._put_together(hook)
            if isinstance(value, str):
                names_by_reason.setdefault(value, []).append(hook.name)
            else:
                values[hook.name] = value
        missing = "; ".join(
            f"{listed(names)}{': each' if len(names) > 1 else ''} {reason}"
            for reason, names in names_by_reason.items()
        )
        if explicit and missing:
            raise RuntimeError(f"{missing}: use run_with_cache on the finished sequence")
        if missing:
            _logger.warning("left out of the cache of a generation: %s", missing)
        return values


#: Options of the model's `generate` with which it processes tokens that do not stay in the
#: sequence.
_OTHER_RUNS = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "custom_generate",
    "use_mtp",
)


def generate(
    bridge: RunnableBridge,
    input: Input,
    options: GenerationOptions,
    program: nn.Module | None = None,
) -> Any:
    """Continue a prompt; see `TransformerBridge.generate`.

    Args:
        bridge: the bridge.
        input, options: as for `TransformerBridge.generate`.
        program: a module whose `generate` is called in place of the model's.
    """
    if program is not None:
        _refuse_recording(options)
    check_return_type(options.return_type)
    by_point = probes_at(options.readings, bridge)
    prompt, arguments = prepared(bridge, input, options)
    if by_point:
        _check_readings(bridge, prompt, options)
    if is_as_text(options.return_type, prompt) and not options.output_logits:
        _ = bridge.tokenizer_facts  # an error now rather than after the generation
    recorder = _step_recorder(bridge, options, arguments, by_point) if _records(options) else None
    if options.output_logits:
        arguments |= {"output_logits": True, "return_dict_in_generate": True}
    bar = _bar(options.max_new_tokens, options.verbose)
    generation = generation_of(bridge, prompt, arguments)
    arguments["stopping_criteria"].append(Steps(bar, generation))
    recording = recorder.at_each_step(bridge.wiring, bridge.core) if recorder else nullcontext()
    with bar, recording, generating(bridge, generation, prompt):
        output = run_generate(bridge, prompt, arguments, program)
    sequences = output["sequences"] if isinstance(output, ModelOutput) else output
    results = [output if options.output_logits else _result(bridge, prompt, sequences, options)]
    if recorder is not None:
        values = _recorded(recorder, prompt, sequences, options)
        if options.return_cache:
            results.append(_cache(bridge, recorder, values, prompt, options))
        if by_point:
            results.append(_readings(by_point, values, prompt, sequences, generation.endings))
    if options.return_input_tokens:
        results.append(prompt.tokens)
    return tuple(results) if len(results) > 1 else results[0]


def _result(
    bridge: RunnableBridge, prompt: GenerationPrompt, sequences: Tensor, options: GenerationOptions
) -> Any:
    """Return the sequences as the user's return type."""
    if options.return_type is None:
        return None
    if is_as_text(options.return_type, prompt):
        return texts_of(bridge, rows_of(prompt, sequences), prompt)
    return aligned(sequences, prompt)


def _bar(tokens: int, verbose: bool) -> tqdm:
    """Return the progress bar of a generation."""
    return tqdm(total=tokens, desc="generating", unit="token", disable=not verbose)


def _recorded(
    recorder: StepRecorder,
    prompt: GenerationPrompt,
    sequences: Tensor,
    options: GenerationOptions,
) -> dict[str, Tensor]:
    """Return the activations of a finished generation, by canonical name, with each row's tokens
    where the model had them.
    """
    before = 0
    if prompt.tokens is None and recorder.pos == "pos" and "inputs_embeds" in prompt.kwargs:
        before = prompt.kwargs["inputs_embeds"].shape[1]
    explicit = not options.return_cache or named_one_by_one(options.names_filter)
    return recorder.put_together(before + sequences.shape[1] - 1, explicit)


def _cache(
    bridge: RunnableBridge,
    recorder: StepRecorder,
    values: dict[str, Tensor],
    prompt: GenerationPrompt,
    options: GenerationOptions,
) -> ActivationCache:
    """Return recorded activations as a cache, each token where the user's sequences have it."""
    # Returned tokens are padded as the user's are; text and logits have no such padding.
    returns_tokens = options.return_type is not None and not is_as_text(options.return_type, prompt)
    right_padded = returns_tokens and not options.output_logits and prompt.to_the_right
    cache = ActivationCache(recorder.given_back(values, prompt.rows, right_padded), bridge)
    cache.mixes_adapters = options.more.get("adapter_names") is not None
    return cache


def _records(options: GenerationOptions) -> str:
    """Return the argument that needs the activations of each step, for errors; "" if none does."""
    if options.return_cache:
        return "return_cache"
    return "readings" if options.readings else ""


def _refuse_recording(options: GenerationOptions) -> None:
    if feature := _records(options):
        raise ValueError(
            f"{feature} is not available with a program: what it captures is not kept for each step"
        )


def _check_readings(
    bridge: RunnableBridge, prompt: GenerationPrompt, options: GenerationOptions
) -> None:
    """Check that every row's own tokens are known.

    Raises:
        ValueError: they are not.
    """
    if bridge.core.config.is_encoder_decoder or prompt.tokens is None:
        raise ValueError(
            "readings are of a prompt of text or tokens, which a decoder continues: for an encoder,"
            " or for embeddings, use bridge.readings or return_cache=True"
        )
    rows = len(prompt.tokens) * options.num_return_sequences
    ends = options.stop_strings or options.stopping_criteria
    if rows > 1 and ends:
        raise ValueError(
            f"readings are not available for {rows} rows with stop_strings or stopping_criteria:"
            " the tokens do not show where a row ended. Generate the rows one by one, or use"
            " bridge.readings on the finished texts"
        )


def _readings(
    by_point: Mapping[str, Sequence[FittedProbe]],
    values: Mapping[str, Tensor],
    prompt: GenerationPrompt,
    sequences: Tensor,
    endings: Sequence[int],
) -> list[dict[str, ProbeReading]]:
    """Return each row's readings of its own tokens but the last, which no step has processed."""
    assert prompt.tokens is not None  # see `_check_readings`
    width, start = sequences.shape[1], prompt.tokens.shape[1]
    stops = torch.tensor(endings, dtype=sequences.dtype, device=sequences.device)
    ended = torch.isin(sequences[:, start:], stops)
    # The tokens before a row's first ending; without one, all but the last.
    behind = torch.where(ended.any(1), start + ended.int().argmax(1), width - 1).tolist()
    readings = []
    for row, tokens in enumerate(rows_of(prompt, sequences)):
        own = slice(width - len(tokens), behind[row])
        acts = {point: values[point][row, own] for point in by_point}
        readings.append(readings_of(by_point, acts))
    return readings


def hf_generate(
    bridge: RunnableBridge,
    input: Input,
    prepend_bos: bool | None,
    arguments: Kwargs,
    return_type: str | None = None,
) -> Any:
    """Call the model's own `generate`; see `TransformerBridge.hf_generate`.

    Args:
        bridge: the bridge.
        input, prepend_bos, return_type: as for `TransformerBridge.hf_generate`.
        arguments: the arguments of the model's `generate`.
    """
    check_return_type(return_type)
    check_generates(bridge)
    arguments = with_past_named(arguments, accepted_by(bridge.core))
    mask = arguments.pop("attention_mask", None)
    prompt = prompt_of(bridge, input, TextOptions(prepend_bos), mask, arguments)
    warn_of_rows(bridge, prompt, arguments)
    criteria = arguments.pop("stopping_criteria", None) or []
    generation = generation_of(bridge, prompt, arguments)
    with generating(bridge, generation, prompt):
        arguments["stopping_criteria"] = [*criteria, Steps(tqdm(disable=True), generation)]
        output = run_generate(bridge, prompt, arguments)
    sequences = output if isinstance(output, Tensor) else output.sequences
    if is_as_text(return_type, prompt):
        return texts_of(bridge, rows_of(prompt, sequences), prompt)
    return output if return_type is None else sequences


def run_generate(
    bridge: RunnableBridge,
    prompt: GenerationPrompt,
    arguments: Kwargs,
    program: nn.Module | None = None,
) -> Any:
    """Call the model's own `generate`, or that of a program."""
    random = bool(chosen(bridge, arguments, "do_sample"))
    refuse_context_parallel()
    if (sharing := bridge.wiring.sharing) is not None:
        sharing.check_alike([prompt.kwargs, arguments.get("max_new_tokens")], random)
    model = program or bridge.original_model
    generate: Any = model.generate  # nn.Module knows nothing of it
    everything = {**prompt.kwargs, **arguments}
    with no_hooks_of_rows_left(model) if tells_layers_of_rows(model, everything) else nullcontext():
        if bridge.wiring.listening and program is None:
            return call_eagerly(model, generate, (), everything)
        return generate(**everything)


def generation_of(
    bridge: RunnableBridge, prompt: GenerationPrompt, arguments: Kwargs
) -> Generation:
    """Return a generation that knows the position of each step in the sequence.

    Args:
        bridge, prompt: the bridge and the prompt.
        arguments: the arguments of the model's `generate`.
    """
    first = prompt.tokens if prompt.tokens is not None else prompt.kwargs.get("inputs_embeds")
    length: int | None = None
    if bridge.core.config.is_encoder_decoder:
        first = arguments.get("decoder_input_ids", prompt.kwargs.get("decoder_input_ids"))
        length = 1  # the token that a decoder starts with
    if first is not None:
        length = first.shape[1]
    in_order = not any(chosen(bridge, arguments, name) for name in _OTHER_RUNS)
    generation = Generation(length, prompt.rows, has_decoders_points(bridge), in_order)
    ending = chosen(bridge, arguments, "eos_token_id")
    if ending is not None and (chosen(bridge, arguments, "num_beams") or 1) == 1:
        generation.endings = ending if isinstance(ending, list) else [ending]
    if chosen(bridge, arguments, "prefill_chunk_size"):
        generation.processed = 0  # the steps do not say how much of the prompt was read
    return generation


def has_decoders_points(bridge: RunnableBridge) -> bool:
    """Tell whether decoder points have their own position axis; not if the encoder has no
    positions.
    """
    points = bridge.wiring.points.values()
    return bridge.core.config.is_encoder_decoder and any(
        "decoder_pos" in hook.point.axes for hook in points
    )


def chosen(bridge: RunnableBridge, arguments: Kwargs, name: str) -> Any:
    """Return an argument of the model's `generate`, or the value of its configuration."""
    if name in arguments:
        return arguments[name]
    return getattr(bridge.core.generation_config, name, None)


@contextmanager
def generating(
    bridge: RunnableBridge, generation: Generation, prompt: GenerationPrompt
) -> Iterator[None]:
    """Return a context for generating from a prompt, in which `generation` counts the steps from
    0."""
    if bridge.wiring.listening:
        bridge.wiring.check_in_place()
    find = Finder(bridge.original_model, core_path(bridge.original_model))
    begun = forward_pass(generation)
    with (
        begun,
        forced_eager(find) if bridge.wiring.listening else nullcontext(),
        own_factors(bridge.core, None),
        nullcontext() if generation.processed is None else _counting(bridge.core, generation),
    ):
        begun.run.gradients = False
        begun.run.take_arguments(bridge.core, prompt.kwargs)
        yield


@contextmanager
def _counting(core: nn.Module, generation: Generation) -> Iterator[None]:
    """Return a context that counts the tokens of each pass of a generation, which may read its
    prompt in chunks."""

    def count(module: nn.Module, args: Any, kwargs: Kwargs) -> None:
        if CURRENT.get().generation is not generation:
            return  # another thread's, or a run of a hook
        inputs = next(
            x
            for name in ("decoder_input_ids", "input_ids", "inputs_embeds")
            if (x := kwargs.get(name)) is not None
        )
        past = past_of(kwargs)
        before = 0 if past is None else int(past.get_seq_length())
        generation.processed = before + inputs.shape[1]

    handle = core.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _step_recorder(
    bridge: RunnableBridge, options: GenerationOptions, arguments: Kwargs, probed: Iterable[str]
) -> StepRecorder:
    """Return a recorder of the chosen hook points, and of those of probes; check that their steps
    can be joined to a sequence."""
    feature = _records(options)
    _check_own_tokens(bridge, arguments, feature)
    core = bridge.core
    points = bridge.select_hooks(options.names_filter) if options.return_cache else []
    points = list(dict.fromkeys([*points, *map(bridge.names.find, probed)]))
    known = accepted_arguments(type(core).forward)
    if "logits_to_keep" in known and any(point.name.startswith("unembed") for point in points):
        # All tokens: `generate` would keep the prompt's last logits alone.
        arguments.setdefault("logits_to_keep", 0)
    accepts_cache = "use_cache" in accepted_by(core)
    caching = accepts_cache and chosen(bridge, arguments, "use_cache") is not False
    bidirectional = bridge.cfg.attention_dir == "bidirectional"
    if caching and bidirectional and not core.config.is_encoder_decoder:
        raise ValueError(
            f"{feature} is not available for {bridge.cfg.model_name}, which reads in both"
            " directions: what a step computes for a token changes with later tokens. Use"
            " run_with_cache on the finished sequence, or use_past_kv_cache=False."
        )
    recorder = StepRecorder(points, options.device, caching, has_decoders_points(bridge))
    rows = [point.name for point in recorder.in_rows]
    if rows and (named_one_by_one(options.names_filter) or len(rows) == len(points)):
        raise ValueError(
            f"{feature} is not available for {listed(rows)}: their rows at each step do not make"
            " those of the sequence. Use run_with_cache on the finished sequence, or"
            " use_past_kv_cache=False."
        )
    return recorder


def _check_own_tokens(bridge: RunnableBridge, arguments: Kwargs, feature: str) -> None:
    """Check that the model processes only the tokens of the sequence, one by one.

    Raises:
        ValueError: it does not, so its activations cannot be kept.
    """
    check_plain_loop(bridge, feature, "Use run_with_cache on the finished sequence")
    conflicts = [name for name in _OTHER_RUNS if chosen(bridge, arguments, name)]
    for name in ("num_beams", "guidance_scale"):
        if (chosen(bridge, arguments, name) or 1) != 1:
            conflicts.append(name)
    if conflicts:
        raise ValueError(
            f"{feature} is not available with {', '.join(conflicts)}: they process tokens"
            " that do not stay in the sequence. Use run_with_cache on the finished sequence."
        )
    if past_of(arguments) is not None:
        raise ValueError(
            f"{feature} is not available with past_key_values: what was computed before is not"
            " seen again. Generate from the whole prompt, or use run_with_cache on the finished"
            " sequence."
        )


# --------------------------------------------------------------------------------------------------
# Generating text piece by piece.
# --------------------------------------------------------------------------------------------------


#: Of a stream: the prompt, or what comes next.
Piece = Tensor | str | list[str]
_END = object()


class _QueueStreamer(BaseStreamer):
    """A streamer that hands each token to another thread, and waits until it requests more.

    `transformers.TextIteratorStreamer` takes one row, holds words back until they are complete, and
    lets the model run ahead of its reader. Here the two never run at the same time, so that the
    reader's own use of the bridge between two pieces stays separate from the generation.
    """

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.asked = threading.Semaphore(0)

    def put(self, value: Tensor) -> None:
        self.queue.put(value)
        self.asked.acquire()

    def end(self) -> None:
        """Do nothing: the worker reports the end once it has returned."""


class TextPieces:
    """The tokens of one row as pieces of text that join to the row's text.

    Some tokenizers rewrite the text of earlier tokens when others follow. Pieces that were already
    returned are not corrected: the next piece starts at the first character that differs.

    Args:
        decode: ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.text = ""

    def add(self, ids: list[int], last: bool = False) -> str:
        """Return the new text, or nothing while it ends within a character."""
        self.ids += ids
        text = self.decode(self.ids)
        if not last and text.endswith("\ufffd"):
            return ""
        same = len(self.text)
        if not text.startswith(self.text):
            pairs = zip(text, self.text, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.text = text
        return text[same:]


def stream(bridge: RunnableBridge, input: Input, arguments: Kwargs) -> Iterator[Any]:
    """Yield a continuation piece by piece; see `TransformerBridge.generate_stream`.

    Errors in the arguments are raised by the call, before the first piece is requested.

    Args:
        bridge: the bridge.
        input, arguments: as for `TransformerBridge.generate_stream`.
    """
    for name in ("return_cache", "return_input_tokens", "output_logits", "readings"):
        if arguments.pop(name, False):
            raise ValueError(f"{name} is not for a stream; generate has it")
    for name in ("names_filter", "device"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is of a cache, and a stream has none")
    options = GenerationOptions.of(arguments)
    check_return_type(options.return_type)
    check_plain_loop(bridge, "a stream", "Use generate")
    prompt, model_arguments = prepared(bridge, input, options)
    as_text = is_as_text(options.return_type, prompt)
    if as_text:
        _ = bridge.tokenizer_facts
    elif prompt.to_the_right and any(prompt.rows.before):
        raise ValueError(
            'a stream of tokens cannot be right-padded; use padding_side="left" or text'
        )
    pieces = _stream(bridge, prompt, model_arguments, as_text, options.verbose)
    next(pieces)  # from here on the generator's `finally` closes the hooks, even if it is abandoned
    return pieces


def _stream(
    bridge: RunnableBridge,
    prompt: GenerationPrompt,
    arguments: Kwargs,
    as_text: bool,
    verbose: bool,
) -> Iterator[Any]:
    """Yield None at once, and then the pieces; generate in a thread meanwhile.

    The thread runs in the context of the call: its hooks stay attached until the stream ends.
    """
    context = contextvars.copy_context()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast: Any = nullcontext()  # a new thread has none of its own
    if kinds:
        autocast = torch.autocast(kinds[0], torch.get_autocast_dtype(kinds[0]))
    with bridge.wiring.scopes_attached(CURRENT.get().shared):
        yield None
        generation = generation_of(bridge, prompt, arguments)
        streamer = _QueueStreamer()

        def work() -> None:
            try:
                with generating(bridge, generation, prompt), autocast:
                    run_generate(bridge, prompt, {**arguments, "streamer": streamer})
            except BaseException as error:  # noqa: BLE001 - raised again by the reader of the pieces
                streamer.queue.put(error)
            else:
                streamer.queue.put(_END)

        bar = _bar(arguments["max_new_tokens"], verbose)
        steps = Steps(bar, generation)
        arguments["stopping_criteria"].append(steps)
        thread = threading.Thread(target=context.run, args=(work,), daemon=True)
        thread.start()
        try:
            yield from _pieces(bridge, streamer, prompt, as_text)
        finally:
            steps.cancelled = True
            streamer.asked.release()
            while thread.is_alive():  # the generation ends with its present step
                streamer.asked.release()
                thread.join(0.01)
            bar.close()


def _pieces(
    bridge: RunnableBridge, streamer: _QueueStreamer, prompt: GenerationPrompt, as_text: bool
) -> Iterator[Any]:
    """Yield the streamed tokens as pieces of the requested kind."""
    rows: list[TextPieces] = []
    while (value := streamer.queue.get()) is not _END:
        if isinstance(value, BaseException):
            raise value
        tokens = value if value.ndim == 2 else value[:, None]
        if not as_text:
            yield tokens
        else:
            new = tokens if rows else rows_of(prompt, tokens)
            rows = rows or [TextPieces(partial(decode, bridge)) for _ in tokens]
            pieces = [row.add(ids.tolist()) for row, ids in zip(rows, new, strict=True)]
            if any(pieces):
                yield of_prompt(pieces, prompt)
        streamer.asked.release()
    rest = [row.add([], last=True) for row in rows]
    if any(rest):
        yield of_prompt(rest, prompt)


def in_pieces(pieces: Iterator[Piece], n: int | None) -> Iterator[Piece]:
    """Return a stream whose pieces are joined, `n` at a time. The prompt remains a separate piece.

    Args:
        pieces: pieces of text, lists of them, or pieces of tokens.
        n: the number of pieces to join; None leaves them unchanged.

    Raises:
        ValueError: `n` is not positive.
    """
    if n is None:
        return pieces
    check_positive("max_tokens_per_yield", n)
    return _joined(pieces, n)


def _joined(pieces: Iterator[Any], n: int) -> Iterator[Piece]:
    with closing(pieces):  # type: ignore[type-var]  # a generator
        yield from itertools.islice(pieces, 1)
        while some := list(itertools.islice(pieces, n)):
            if isinstance(some[0], Tensor):
                yield torch.cat(some, dim=-1)
            elif isinstance(some[0], str):
                yield "".join(some)
            else:
                yield ["".join(row) for row in zip(*some, strict=True)]
