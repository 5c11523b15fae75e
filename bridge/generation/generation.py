"""Generating text: one thin layer over the model's own `generate`, so that every hook acts on every step of it."""

from __future__ import annotations

import contextvars
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import StoppingCriteriaList
from transformers.generation import BaseStreamer
from transformers.utils import ModelOutput

from adapters.inputs import accepted_arguments, accepted_by, past_of, with_past_named
from adapters.points import core_path
from adapters.spread import refuse_context_parallel
from adapters.views import Args, Deferred, Kwargs
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
    tell_of_rows,
    texts_of,
)
from bridge.generation.packed import with_unseen_keys
from bridge.hooks.arguments import check_positive, listed
from bridge.hooks.context import CURRENT, Generation, forward_pass
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import Finder
from bridge.hooks.names import named_one_by_one
from bridge.hooks.rows import BatchRows
from bridge.run.inputs import Input, RunnableBridge
from bridge.run.recorder import ActivationRecorder
from bridge.run.tokenization import TextOptions
from bridge.wiring.compiled import call_eagerly, forced_eager
from bridge.wiring.wiring import Wiring

# ----------------------------------------------------------------------------------------------------------------------
# Recording the activations of a generation, step by step.
# ----------------------------------------------------------------------------------------------------------------------


_logger = logging.getLogger(__name__)


class StepRecorder(ActivationRecorder):
    """Keeps what hook points see at every step, and puts the steps together.

    Args:
        points: the hook points.
        device: where to keep them; None: where they are.
        caching: the model keeps keys and values, so that each step processes new tokens only.
        encoder_decoder: it is the decoder's sequence that grows.
    """

    def __init__(
        self, points: Sequence[HookPoint], device: torch.device | str | None, caching: bool, encoder_decoder: bool
    ) -> None:
        super().__init__(points, device=device)
        self.caching = caching
        self.pos, self.key_pos = ("decoder_pos", "decoder_key_pos") if encoder_decoder else ("pos", "key_pos")
        self.seen = 0  # tokens before the present step
        self.new = 0  # tokens of the present step
        self.steps = 0  # whose activations are kept
        self._parts: dict[HookPoint, list[Tensor]] = {}
        self._from_start: set[HookPoint] = set()  # ran at the prompt
        #: Whose rows at each step do not make those of the sequence: they are not kept.
        self.in_rows = dict.fromkeys(point for point in points if caching and "row" in point.point.axes.split())

    as_shown = False

    @contextmanager
    def at_each_step(self, wiring: Wiring, core: nn.Module) -> Iterator[None]:
        """Listens in the generation that starts inside the ``with`` statement."""
        with self.attached(wiring) as scope:

            def begin(module: nn.Module, args: Any, kwargs: Any = None) -> None:  # none where it comes, or goes
                if kwargs is not None and scope in CURRENT.get().visible:
                    self._begin(args, kwargs)

            handle = core.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
            try:
                yield
            finally:
                handle.remove()

    def _begin(self, args: Args, kwargs: Kwargs) -> None:
        names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
        given = [kwargs.get(name) for name in names]
        tokens = args[0] if args else next(value for value in given if value is not None)
        self.seen = self.seen + self.new if self.caching else 0
        self.new = tokens.shape[1]
        self.steps += 1
        if not self.caching:
            self.steps = 1
            self._parts.clear()  # this step processes everything again
            self.versions.clear()

    def read(self, act: Tensor | Deferred, hook: HookPoint) -> None:
        """Keeps what this step adds to an activation."""
        axes = hook.point.axes.split()
        if hook in self.in_rows:
            return
        act = act.value(hook.name) if isinstance(act, Deferred) else act.detach()
        total = self.seen + self.new
        if self.key_pos in axes:
            axis = axes.index(self.key_pos)
            keys = act.shape[axis]
            if self.pos not in axes:  # keys and values of the whole past: these are the new ones
                start = self.seen if keys >= total else keys - self.new
                act = act.narrow(axis, start, self.new).clone()
            elif keys > total:  # a cache of fixed size
                act = act.narrow(axis, 0, total)
            elif keys < total:  # a window that has moved on
                act = with_unseen_keys(act, axis, (total - keys, 0), hook)
        if self.pos in axes and act.shape[axes.index(self.pos)] > self.new:  # of the past too (keys from a latent)
            axis = axes.index(self.pos)
            if act.shape[axis] < total and ".attn." not in hook.name:  # no window of keys
                raise ValueError(
                    f"{hook.name} has {act.shape[axis]} positions in a step of {self.new} after {self.seen} tokens: "
                    "its steps make no sequence. Generate the rows one by one (transformers' RWKV mixes the rows of a "
                    "batch), or use run_with_cache on the finished sequence"
                )
            start = self.seen if act.shape[axis] >= total else act.shape[axis] - self.new
            act = act.narrow(axis, start, self.new).clone()
        kept = self.noted(act if self.device is None else act.to(self.device), hook)
        self._parts.setdefault(hook, []).append(kept)
        if not self.seen:
            self._from_start.add(hook)

    def given_back(self, values: dict[str, Tensor], rows: BatchRows, behind: bool) -> dict[str, Tensor]:
        """The activations with each token where the user has it.

        Args:
            values: by canonical name.
            rows: how the rows of the prompt lie.
            behind: the user has the padding of the sequences behind them, as in the tokens that are returned.
        """
        axes = {hook.name: hook.point.axes.split() for hook in self.points}
        return {name: rows.given_back(value, axes[name], behind) for name, value in values.items()}

    def _put_together(self, hook: HookPoint) -> Tensor | str:
        """The steps of a hook point as one activation; or why they make none."""
        if hook in self.in_rows:
            return "has rows of each step, which do not make those of the sequence"
        if hook not in self._from_start:
            return "did not run on this prompt"
        total = self.seen + self.new
        parts, axes = self._parts[hook], hook.point.axes.split()
        grows = next((axes.index(axis) for axis in (self.pos, self.key_pos) if axis in axes), None)
        if grows is None:
            along = any("pos" in axis for axis in axes)  # of the encoder, which runs once
            if not along and (len(parts) < self.steps or len({part.shape for part in parts}) > 1):
                return "has no axis of positions, and is no state that each step makes anew"
            return parts[-1]
        if {self.pos, self.key_pos} <= set(axes):
            key = axes.index(self.key_pos)
            parts = [with_unseen_keys(part, key, (0, total - part.shape[key]), hook) for part in parts]
        if "held_pos" in axes and len(parts) > 1:
            return "is of keys that stand for several tokens, which are others in each step"
        whole = torch.cat(parts, dim=grows)
        if whole.shape[grows] != total:
            return f"was computed at {whole.shape[grows]} of {total} tokens"
        return whole

    def put_together(self, processed: int, explicit: bool) -> dict[str, Tensor]:
        """The activations of every token that was processed, by canonical name.

        Hook points are left out that did not run on the prompt (those of the embedding, where embeddings were given),
        and those whose steps cannot be put together (a convolution that runs on the prompt alone).

        Args:
            processed: how many tokens of each row the model must have processed.
            explicit: the hook points were named one by one: each of them has to be there.

        Raises:
            ValueError: they were others.
            RuntimeError: a point was named that would be left out; or an activation was changed in place after it was
                recorded.
        """
        total = self.seen + self.new
        if total != processed:
            raise ValueError(
                f"the steps of this generation processed {total} tokens, and its sequence has {processed} that should "
                "have been: use run_with_cache on the finished sequence"
            )
        self.check_unchanged()
        made = {hook.name: self._put_together(hook) for hook in self.points}
        alike: dict[str, list[str]] = {}
        for name, why in made.items():
            if isinstance(why, str):
                alike.setdefault(why, []).append(name)
        missing = "; ".join(
            f"{listed(names)}{': each' if len(names) > 1 else ''} {why}" for why, names in alike.items()
        )
        if explicit and missing:
            raise RuntimeError(f"{missing}: use run_with_cache on the finished sequence")
        if missing:
            _logger.warning("left out of the cache of a generation: %s", missing)
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}


#: Options of the model's `generate` with which it processes tokens that do not stay in the sequence.
_OTHER_RUNS = (
    "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers",
    "custom_generate", "use_mtp",
)  # fmt: skip


def generate(bridge: RunnableBridge, input: Input, options: GenerationOptions, program: nn.Module | None = None) -> Any:
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
    recording = recorder.at_each_step(bridge.wiring, bridge.core) if recorder else nullcontext()
    with bar, recording, generating(bridge, generation, prompt):
        made = run_generate(bridge, prompt, arguments, program)
    sequences = made["sequences"] if isinstance(made, ModelOutput) else made
    result: Any = None
    if options.output_logits:
        result = made
    elif options.return_type is not None:
        result = texts_of(bridge, rows_of(prompt, sequences), prompt) if as_text else aligned(sequences, prompt)
    extras: list[Any] = []
    if recorder is not None:
        embedded = prompt.kwargs.get("inputs_embeds") if prompt.tokens is None and recorder.pos == "pos" else None
        before = 0 if embedded is None else embedded.shape[1]
        explicit = named_one_by_one(options.names_filter)
        values = recorder.put_together(before + sequences.shape[1] - 1, explicit)
        behind = result is not None and not as_text and not options.output_logits and prompt.to_the_right
        values = recorder.given_back(values, prompt.rows, behind)
        extras.append(ActivationCache(values, bridge))
        extras[0].mixes_adapters = arguments.get("adapter_names") is not None
    if options.return_input_tokens:
        extras.append(prompt.tokens)
    return (result, *extras) if extras else result


def hf_generate(
    bridge: RunnableBridge,
    input: Input,
    prepend_bos: bool | None,
    arguments: Kwargs,
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
    arguments = with_past_named(arguments, accepted_by(bridge.core))
    prompt = prompt_of(bridge, input, TextOptions(prepend_bos), arguments.pop("attention_mask", None), arguments)
    tell_of_rows(bridge, prompt, arguments)
    criteria = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
    generation = generation_of(bridge, prompt, arguments)
    with generating(bridge, generation, prompt):
        arguments["stopping_criteria"] = [*criteria, Steps(tqdm(disable=True), generation)]
        made = run_generate(bridge, prompt, arguments)
    sequences = made if isinstance(made, Tensor) else made.sequences
    if return_type == "str" or (return_type == "input" and prompt.kind != "tokens"):
        return texts_of(bridge, rows_of(prompt, sequences), prompt)
    return made if return_type is None else sequences


def run_generate(
    bridge: RunnableBridge, prompt: GenerationPrompt, arguments: Kwargs, program: nn.Module | None = None
) -> Any:
    """Calls the model's own `generate`, or that of a program."""
    random = bool(chosen(bridge, arguments, "do_sample"))
    refuse_context_parallel()
    if (sharing := bridge.wiring.sharing) is not None:
        sharing.check_alike([prompt.kwargs, arguments.get("max_new_tokens")], random)
    model = program or bridge.original_model
    generate: Any = model.generate  # nn.Module knows nothing of it
    if bridge.wiring.listening and program is None:
        return call_eagerly(model, generate, (), {**prompt.kwargs, **arguments})
    return generate(**prompt.kwargs, **arguments)


def generation_of(bridge: RunnableBridge, prompt: GenerationPrompt, arguments: Kwargs) -> Generation:
    """A generation from a prompt, of which is known where in the sequence each step is.

    Args:
        bridge, prompt: the bridge, and what it starts from.
        arguments: of the model's `generate`.
    """
    of_decoder = has_decoders_points(bridge)
    given = prompt.tokens if prompt.tokens is not None else prompt.kwargs.get("inputs_embeds")
    if bridge.core.config.is_encoder_decoder:
        given = arguments.get("decoder_input_ids", prompt.kwargs.get("decoder_input_ids"))
    if given is None:
        length = 1 if bridge.core.config.is_encoder_decoder else None  # the token that a decoder starts with
    else:
        length = given.shape[1]
    in_order = not any(chosen(bridge, arguments, name) for name in (*_OTHER_RUNS, "prefill_chunk_size"))
    return Generation(length, prompt.rows, of_decoder, in_order)


def has_decoders_points(bridge: RunnableBridge) -> bool:
    """Whether a decoder's points have positions of their own: not where the encoder has none."""
    points = bridge.wiring.points.values()
    return bridge.core.config.is_encoder_decoder and any("decoder_pos" in hook.point.axes for hook in points)


def chosen(bridge: RunnableBridge, arguments: Kwargs, name: str) -> Any:
    """An argument of the model's `generate`: as it was given, or else as the model's own configuration says."""
    return arguments[name] if name in arguments else getattr(bridge.core.generation_config, name, None)


@contextmanager
def generating(bridge: RunnableBridge, generation: Generation, prompt: GenerationPrompt) -> Iterator[None]:
    """A generation from a prompt: a run of its own, whose steps `generation` counts from 0."""
    if bridge.wiring.listening:
        bridge.wiring.check_in_place()
    find = Finder(bridge.original_model, core_path(bridge.original_model))
    begun = forward_pass(generation)
    with begun, forced_eager(find) if bridge.wiring.listening else nullcontext():
        begun.run.gradients = False
        begun.run.take_arguments(bridge.core, prompt.kwargs)
        yield


def _step_recorder(bridge: RunnableBridge, options: GenerationOptions, arguments: Kwargs) -> StepRecorder:
    _refuse_other_runs(bridge, arguments)
    points = bridge.select_hooks(options.names_filter)
    known = accepted_arguments(type(bridge.core).forward)
    if "logits_to_keep" in known and any(point.name.startswith("unembed") for point in points):
        arguments.setdefault("logits_to_keep", 0)  # of every token: `generate` would ask for the prompt's last
    caching = chosen(bridge, arguments, "use_cache") is not False and "use_cache" in accepted_by(bridge.core)
    if caching and bridge.cfg.attention_dir == "bidirectional" and not bridge.core.config.is_encoder_decoder:
        raise ValueError(
            f"return_cache cannot be had for {bridge.cfg.model_name}, which reads in both directions: what a step "
            "computes for a token changes with the tokens behind it. Use run_with_cache on the finished sequence, or "
            "use_past_kv_cache=False."
        )
    recorder = StepRecorder(points, options.device, caching, has_decoders_points(bridge))
    rows = [point.name for point in recorder.in_rows]
    if rows and (named_one_by_one(options.names_filter) or len(rows) == len(points)):
        raise ValueError(
            f"return_cache cannot be had for {listed(rows)}: their rows at each step do not make those of the "
            "sequence. Use run_with_cache on the finished sequence, or use_past_kv_cache=False."
        )
    return recorder


def _refuse_other_runs(bridge: RunnableBridge, arguments: Kwargs) -> None:
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
    if past_of(arguments) is not None:
        raise ValueError(
            "return_cache cannot be had with past_key_values: what was computed before is not seen again. Generate "
            "from the whole prompt, or use run_with_cache on the finished sequence."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Generating text piece by piece.
# ----------------------------------------------------------------------------------------------------------------------


#: Of a stream: the prompt, or what comes next.
Piece = Tensor | str | list[str]
_END = object()


class QueueStreamer(BaseStreamer):
    """Hands what transformers streams to another thread, and waits until that asks for more.

    `transformers.TextIteratorStreamer` takes one row, holds words back until they are complete, and lets the model run
    ahead of its reader. Here the two never run at the same time: what the reader does with the bridge between
    two pieces is no part of the generation.
    """

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.asked = threading.Semaphore(0)

    def put(self, value: Tensor) -> None:
        self.queue.put(value)
        self.asked.acquire()

    def end(self) -> None:
        """The loop is over; the worker says so once it has returned."""


class TextPieces:
    """Turns the tokens of one row into pieces of text whose sum is the text of them all.

    Where a tokenizer writes earlier tokens in another way once others follow, what was given stays: the next piece is
    the text from the first character on that is another.

    Args:
        decode: ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.given = ""

    def add(self, ids: list[int], last: bool = False) -> str:
        """What is new in the text, as far as it is certain: half a character waits for its other half."""
        self.ids += ids
        text = self.decode(self.ids)
        if not last and text.endswith("\ufffd"):
            return ""
        same = len(self.given)
        if not text.startswith(self.given):
            same = next(
                (i for i, (new, old) in enumerate(zip(text, self.given, strict=False)) if new != old), len(text)
            )
        piece, self.given = text[same:], text
        return piece


def stream(bridge: RunnableBridge, input: Input, arguments: Kwargs) -> Iterator[Any]:
    """Yields a continuation piece by piece; see `TransformerBridge.generate_stream`.

    Everything that can be refused is refused here, before the first piece is asked for.

    Args:
        bridge: the bridge.
        input, arguments: as there.
    """
    for name in ("return_cache", "return_input_tokens", "output_logits"):
        if arguments.pop(name, False):
            raise ValueError(f"{name} is not for a stream; generate has it")
    for name in ("names_filter", "device"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is of a cache, and a stream has none")
    options = GenerationOptions.of(arguments)
    check_return_type(options.return_type)
    check_plain_loop(bridge, "a stream", "Use generate")
    prompt, given = prepared(bridge, input, options)
    as_text = is_as_text(options.return_type, prompt)
    if as_text:
        _ = bridge.tokenizer_facts
    elif prompt.to_the_right and any(prompt.rows.before):
        raise ValueError('a stream of tokens cannot be padded behind; use padding_side="left" or text')
    return _stream(bridge, prompt, given, as_text, options.verbose)


def _stream(
    bridge: RunnableBridge, prompt: GenerationPrompt, arguments: Kwargs, as_text: bool, verbose: bool
) -> Iterator[Any]:
    bar = tqdm(total=arguments["max_new_tokens"], desc="generating", unit="token", disable=not verbose)
    generation = generation_of(bridge, prompt, arguments)
    streamer, steps = QueueStreamer(), Steps(bar, generation)
    arguments["stopping_criteria"].append(steps)
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    def work() -> None:
        try:
            with generating(bridge, generation, prompt), torch.autocast(*autocast[0]) if autocast else nullcontext():
                run_generate(bridge, prompt, {**arguments, "streamer": streamer})
        except BaseException as error:  # noqa: BLE001
            streamer.queue.put(error)  # it is raised again where the pieces are asked for
        else:
            streamer.queue.put(_END)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        yield from _pieces(bridge, streamer, prompt, as_text)
    finally:
        steps.cancelled = True
        streamer.asked.release()
        while thread.is_alive():  # the step that was under way ends, and with it the generation
            streamer.asked.release()
            thread.join(0.01)
        bar.close()


def _pieces(bridge: RunnableBridge, streamer: QueueStreamer, prompt: GenerationPrompt, as_text: bool) -> Iterator[Any]:
    """The stream of tokens as pieces of what the user asked for."""
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
    """A stream whose pieces are joined, `n` at a time. The prompt stays alone.

    Args:
        pieces: of text, of texts, or of tokens.
        n: None leaves them as they are.

    Raises:
        ValueError: `n` is not positive.
    """
    if n is None:
        return pieces
    check_positive("max_tokens_per_yield", n)
    return _joined(pieces, n)


def _joined(pieces: Iterator[Piece], n: int) -> Iterator[Piece]:
    with closing(pieces):  # type: ignore[type-var]  # a generator
        yield from itertools.islice(pieces, 1)
        while some := list(itertools.islice(pieces, n)):
            if isinstance(some[0], Tensor):
                yield torch.cat([piece for piece in some if isinstance(piece, Tensor)], dim=-1)
            elif isinstance(some[0], str):
                yield "".join([piece for piece in some if isinstance(piece, str)])
            else:
                yield ["".join(row) for row in zip(*some, strict=True)]
