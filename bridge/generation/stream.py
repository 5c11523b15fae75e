"""Generating text piece by piece."""

from __future__ import annotations

import contextvars
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation import BaseStreamer

from bridge.generation.criteria import Steps
from bridge.generation.generate import generating, generation_of, run_generate
from bridge.generation.options import GenerationOptions, check_plain_loop, prepared
from bridge.generation.prompt import Generates, GenerationPrompt, check_return_type, decode, is_as_text
from bridge.hooks.arguments import check_positive
from bridge.run.protocol import Input

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


def stream(bridge: Generates, input: Input, arguments: dict[str, Any]) -> Iterator[Any]:
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
    elif prompt.to_the_right and any(prompt.padding):
        raise ValueError('a stream of tokens cannot be padded behind; use padding_side="left" or text')
    return _stream(bridge, prompt, given, as_text, options.verbose)


def _stream(
    bridge: Generates, prompt: GenerationPrompt, arguments: dict[str, Any], as_text: bool, verbose: bool
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


def _pieces(bridge: Generates, streamer: QueueStreamer, prompt: GenerationPrompt, as_text: bool) -> Iterator[Any]:
    """The stream of tokens as pieces of what the user asked for."""
    rows: list[TextPieces] = []
    first = True
    while True:
        if not first:
            streamer.asked.release()
        first = False
        value = streamer.queue.get()
        if isinstance(value, BaseException):
            raise value
        if value is _END:
            break
        tokens = value if value.ndim == 2 else value[:, None]
        if not as_text:
            yield tokens
            continue
        if not rows:
            rows = [TextPieces(partial(decode, bridge)) for _ in tokens]
            skip = [0] * len(tokens) if bridge.core.config.is_encoder_decoder else _skips(prompt, len(tokens))
            pieces = [row.add(ids[n:].tolist()) for row, ids, n in zip(rows, tokens, skip, strict=True)]
        else:
            pieces = [row.add(ids.tolist()) for row, ids in zip(rows, tokens, strict=True)]
        if any(pieces):
            yield pieces[0] if prompt.kind == "str" and len(pieces) == 1 else pieces
    if as_text:
        rest = [row.add([], last=True) for row in rows]
        if any(rest):
            yield rest[0] if prompt.kind == "str" and len(rest) == 1 else rest


def _skips(prompt: GenerationPrompt, rows: int) -> list[int]:
    copies = rows // len(prompt.padding)
    return [prompt.padding[i // copies] for i in range(rows)]


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
