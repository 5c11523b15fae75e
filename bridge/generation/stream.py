"""Generating text piece by piece."""

from __future__ import annotations

import contextvars
import inspect
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation import BaseStreamer

from bridge.generation.criteria import Steps
from bridge.generation.generate import Prompt, check_return_type
from bridge.hooks.hook_point import STATE

_END = object()


class QueueStreamer(BaseStreamer):
    """Hands what transformers streams to another thread, and waits until that asks for more.

    The two never run at the same time: what the reader does with the bridge between two pieces is no part of the
    generation.
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
        if not last and (text.endswith("\ufffd") or not text.startswith(self.given)):
            return ""
        piece, self.given = text[len(self.given) :], text
        return piece


class StreamMethods:
    """The method of a bridge that yields what it generates."""

    original_model: Any
    core: Any

    def generate_stream(self, input: Any = "", **arguments: Any) -> Iterator[Any]:
        """Yields a continuation piece by piece, the prompt first.

        The pieces join to exactly what `generate` returns: strings (a list of strings, one for each row, for a list of
        texts), or tokens ``[batch, new]`` to be joined along the last axis. The model runs in a thread of its own, with
        the hooks of the thread that calls; leaving the loop early ends it at the next token.

        Args:
            input: as for `generate`.
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
        return self._stream(*self._stream_arguments(input, dict(arguments)))

    def _stream_arguments(self, input: Any, arguments: dict[str, Any]) -> tuple[Prompt, dict[str, Any], bool, bool]:
        """Everything that can be refused is refused here, before the first piece is asked for."""
        for name in ("return_cache", "return_input_tokens", "output_logits"):
            if arguments.pop(name, False):
                raise ValueError(f"{name} is not for a stream; generate has it")
        for name in ("names_filter", "device"):
            if arguments.get(name) is not None:
                raise ValueError(f"{name} is of a cache, and a stream has none")
        bound = inspect.signature(self.generate).bind(input, **arguments)  # type: ignore[attr-defined]
        bound.apply_defaults()
        given = bound.arguments
        return_type, verbose = given["return_type"], given["verbose"]
        check_return_type(return_type)
        prompt, options = self._arguments(given)  # type: ignore[attr-defined]
        as_text = return_type == "str" or (return_type == "input" and prompt.kind != "tokens")
        if as_text:
            _ = self.tokenizer_facts  # type: ignore[attr-defined]
        elif prompt.to_the_right and any(prompt.padding):
            raise ValueError('a stream of tokens cannot be padded behind; use padding_side="left" or text')
        return prompt, options, as_text, verbose

    def _stream(self, prompt: Prompt, options: dict[str, Any], as_text: bool, verbose: bool) -> Iterator[Any]:
        bar = tqdm(total=options["max_new_tokens"], desc="generating", unit="token", disable=not verbose)
        streamer, steps = QueueStreamer(), Steps(bar)
        options["stopping_criteria"].append(steps)
        owner = STATE.owner
        autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]

        def work() -> None:
            STATE.owner = owner  # hooks belong to the thread that generates, not to this helper of it
            try:
                with self._generating():  # type: ignore[attr-defined]
                    if autocast:
                        with torch.autocast(*autocast[0]):
                            self.original_model.generate(**prompt.kwargs, streamer=streamer, **options)
                    else:
                        self.original_model.generate(**prompt.kwargs, streamer=streamer, **options)
            except BaseException as error:  # noqa: BLE001
                streamer.queue.put(error)  # it is raised again where the pieces are asked for
            else:
                streamer.queue.put(_END)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
        thread.start()
        try:
            yield from self._pieces(streamer, prompt, as_text)
        finally:
            steps.cancelled = True
            streamer.asked.release()
            while thread.is_alive():  # the step that was under way ends, and with it the generation
                streamer.asked.release()
                thread.join(0.01)
            bar.close()

    def _pieces(self, streamer: QueueStreamer, prompt: Prompt, as_text: bool) -> Iterator[Any]:
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
                rows = [TextPieces(self._decode) for _ in tokens]  # type: ignore[attr-defined]
                skip = [0] * len(tokens) if self.core.config.is_encoder_decoder else self._skips(prompt, len(tokens))
                pieces = [row.add(ids[n:].tolist()) for row, ids, n in zip(rows, tokens, skip, strict=True)]
            else:
                pieces = [row.add(ids.tolist()) for row, ids in zip(rows, tokens, strict=True)]
            if any(pieces):
                yield pieces[0] if prompt.kind == "str" and len(pieces) == 1 else pieces
        if as_text:
            rest = [row.add([], last=True) for row in rows]
            if any(rest):
                yield rest[0] if prompt.kind == "str" and len(rest) == 1 else rest

    @staticmethod
    def _skips(prompt: Prompt, rows: int) -> list[int]:
        copies = rows // len(prompt.padding)
        return [prompt.padding[i // copies] for i in range(rows)]
