"""`AsyncEngine`, and vLLM's OpenAI-compatible server with saved interventions.

A server's request passes ``vllm_xargs: {"interventions": "steer.safetensors"}``. The file must be
in a folder that the server was started with. It is read as data (`bridge.interventions.load`),
turned into table rows, and kept in the tables while the request runs. It may also pass
``"readings"``, the names of readings that the server was started with; their numbers are in the
answer's ``kv_transfer_params``, the one field that vLLM leaves to others. The cache salt of its
prefix is derived from the edit, whatever salt the client sends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as tensors_of
from torch import Tensor

from bridge.engine import insides
from bridge.engine.engine import Engine, EngineAnswer, FromAnswers
from bridge.engine.readings import EngineReading, Readable, results_of, unsent
from bridge.engine.tables import EngineEdit, fit, packed
from bridge.hooks.names import NamesFilter
from bridge.interventions import load
from bridge.run.inputs import HookSpec

#: The key of the file name in a request.
_NAME = "interventions"
#: What the worker has captured, by name.
Captured = Mapping[str, Tensor]
#: The key of the names of its readings.
_READ = "readings"
#: The edit of a request without interventions.
_NO_EDIT = EngineEdit("", ())


def serve(
    model: str | PathLike[str],
    points: NamesFilter,
    folders: Sequence[str | PathLike[str]],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: torch.dtype | None = None,
    rows: int = 64,
    rank: int = 1,
    readings: Sequence[Readable] = (),
    **options: Any,
) -> None:
    """Serve a model until interrupted. A separate engine proves the hook points first and is then
    closed.

    Args:
        model, points, dtype, rows, rank, options: as for `Engine`; with ``adapters=``, a request
            selects an adapter by its ``model`` field.
        folders: the folders of saved interventions; a request names a file in one of them.
        readings: probes and lenses, which a request selects by name: ``vllm_xargs: {"readings":
            "city"}``.
        host, port: the address of the server.

    Raises:
        ValueError: a hook point that is not offered, with the reason; otherwise as for `Engine`.
        NotADirectoryError: one of `folders` is not a folder.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise NotADirectoryError(f"folders= names {folder}, which is no folder")
    engine = Engine(model, points, dtype=dtype, rows=rows, rank=rank, **options)
    engine.close()
    if engine.refused:
        name, why = next(iter(engine.refused.items()))
        raise ValueError(f"{name} is not offered in this engine: {why}")
    edits = SavedEdits(engine, folders, rows, engine.read(readings))
    insides.serve(*engine.started_with, {"host": host, "port": port}, engine.adapters, edits.around)


class _EditRoom:
    """The allocation of table rows to concurrent requests.

    Args:
        rows: the number of rows per site.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._held: dict[str, EngineEdit] = {}
        self._running: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def holds(self, edit: EngineEdit, rpc: Callable[..., Any]) -> AsyncIterator[None]:
        """Wait for free rows for an edit, fill them, and hold them until the context exits.

        Args:
            edit: the edit; an empty edit needs no rows.
            rpc: the function that calls the worker.
        """
        if not edit.sites:
            yield
            return
        await self._begin(edit, rpc)
        try:
            yield
        finally:
            async with self._changed:
                self._running[edit.key] -= 1
                self._changed.notify_all()

    async def _begin(self, edit: EngineEdit, rpc: Callable[..., Any]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: edit.key in self._held or self._fits(edit))
            if edit.key not in self._held:
                in_use = self._in_use()
                kept = self._held if fit([*self._held.values(), edit], self._rows) else in_use
                self._held = in_use  # if this fails, the state of the other edits is unknown
                await rpc("bridge_edit", args=packed([*kept.values(), edit]))
                self._held = {**kept, edit.key: edit}
            self._running[edit.key] += 1

    def _in_use(self) -> dict[str, EngineEdit]:
        return {key: edit for key, edit in self._held.items() if self._running[key]}

    def _fits(self, edit: EngineEdit) -> bool:
        return fit([*self._in_use().values(), edit], self._rows)


class SavedEdits:
    """The saved interventions that requests of a server refer to.

    Args:
        engine: an engine that has proved the hook points and knows their places.
        folders: the folders that files may be in.
        rows: the number of rows per site.
        readings: the readings that requests may name.
    """

    def __init__(
        self,
        engine: Engine,
        folders: Sequence[str | PathLike[str]],
        rows: int,
        readings: Sequence[EngineReading] = (),
    ) -> None:
        self._engine = engine
        self._readings = {reading.label: reading for reading in readings}
        self._numbers = count()
        self._sent: set[str] = set()
        self._folders = [Path(folder).resolve() for folder in folders]
        self._known: dict[tuple[Path, int, int], EngineEdit] = {}
        self._room = _EditRoom(rows)

    def edit(self, name: object) -> EngineEdit:
        """Return the edit that a file contains.

        Args:
            name: the file's name in one of the folders.

        Raises:
            ValueError: the file does not exist, lies elsewhere, or contains an unsupported edit.
        """
        file = self._file(name)
        stat = file.stat()
        key = file, stat.st_mtime_ns, stat.st_size
        if key not in self._known:
            try:
                self._known[key] = self._engine.edit(load(file, self._engine.bridge))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
        return self._known[key]

    def _file(self, name: object) -> Path:
        """Return the file with a name in one of the folders.

        Raises:
            ValueError: the file does not exist, or lies elsewhere.
        """
        for folder in self._folders if isinstance(name, str) else ():
            file = (folder / str(name)).resolve()
            if file.is_relative_to(folder) and file.is_file():
                return file
        raise ValueError(
            f"there is no file {name!r} in the folders of interventions that are served here"
        )

    def readings(self, names: object) -> list[EngineReading]:
        """Return the readings that a request names.

        Args:
            names: one name, or a list of them.

        Raises:
            ValueError: there is no such reading here.
        """
        listed: list[Any] = names if isinstance(names, list) else [names]
        for name in listed:
            if name not in self._readings:
                known = ", ".join(self._readings) or "none"
                raise ValueError(f"there is no reading {name!r} here; there are {known}")
        return [self._readings[name] for name in listed]

    def around(self, client: Any) -> None:
        """Make a client of vLLM's engine load the interventions that its requests name.

        Args:
            client: vLLM's `AsyncLLM`.
        """
        generate = client.generate
        rpc = client.collective_rpc

        async def read_too(
            running: Any, length: int, number: int, read: Sequence[EngineReading]
        ) -> AsyncIterator[Any]:
            try:
                async with aclosing(running) as outputs:
                    async for out in outputs:
                        if out.finished:
                            captured = await _taken(number, rpc)
                            out.kv_transfer_params = _served(out, length, number, read, captured)
                        yield out
            finally:
                await _taken(number, rpc)  # there is something if the client has left

        async def edited(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            extra = dict(params.extra_args or {})
            if "bridge" in extra:
                raise ValueError("vllm_xargs has 'bridge', which is not for clients")
            edit = self.edit(extra.pop(_NAME)) if _NAME in extra else None
            read = self.readings(extra.pop(_READ)) if _READ in extra else []
            prompt = _salted(prompt, edit)
            number = next(self._numbers)
            keys = [reading.key for reading in read]
            edit = edit or _NO_EDIT
            is_plain = not edit.key and not keys
            length = 0 if is_plain else len(prompt["prompt_token_ids"])
            try:
                edit.check_prompt(length)
            except IndexError as error:
                raise ValueError(str(error)) from error
            if not is_plain:
                ticket = {"number": number, "capture": [], "edit": edit.key, "read": keys}
                params.extra_args = {**extra, "bridge": ticket}
                params.skip_reading_prefix_cache = params.skip_reading_prefix_cache or bool(keys)
            await _send(read, self._sent, rpc)
            async with self._room.holds(edit, rpc):
                running: Any = generate(prompt, params, *args, **kwargs)
                running = read_too(running, length, number, read) if read else running
                async with aclosing(running) as outputs:
                    async for out in outputs:
                        yield out

        client.generate = edited


class AsyncEngine:
    """An `Engine` for a program with an event loop, such as your own server: ``AsyncLLM`` with hook
    points.

    A separate engine proves the hook points first and is then closed. Requests may arrive at any
    time, each with its own edit.

    Args:
        model, points, rows, more: as for `Engine`.

    Attributes:
        bridge, refused: as for `Engine`.

    Raises:
        VersionError, UnknownHookError, TypeError, ValueError: as for `Engine`.

    Example:
        >>> import asyncio
        >>> from bridge.engine import AsyncEngine
        >>> async def main():
        ...     engine = AsyncEngine("folder/of/a/model", points=["blocks.1.hook_resid_post"])
        ...     async for answer in engine.stream("Mary and", 4):
        ...         print(answer.text)  # what there is so far
        ...     engine.close()
        >>> asyncio.run(main())  # doctest: +SKIP
    """

    def __init__(
        self, model: str | PathLike[str], points: NamesFilter, *, rows: int = 64, **more: Any
    ) -> None:
        engine = Engine(model, points, rows=rows, **more)
        engine.close()
        self._engine = engine
        self.bridge = engine.bridge
        self.refused = engine.refused
        self._client = insides.started_async(*engine.started_with)
        self._room = _EditRoom(rows)
        self._numbers = count()
        self._sent: set[str] = set()

    def offered(self) -> list[str]:
        """Return the hook points that passed the proof, as `Engine.offered`."""
        return self._engine.offered()

    def close(self) -> None:
        """Stop the engine's process."""
        self._client.shutdown()

    async def stream(
        self,
        prompt: str | Sequence[int] | Tensor,
        max_new_tokens: int,
        interventions: Sequence[HookSpec] = (),
        capture: NamesFilter = (),
        *,
        readings: Sequence[Readable] = (),
        adapter_name: str | None = None,
        stop_at_eos: bool = True,
        prepend_bos: bool | None = None,
        **sampling: Any,
    ) -> AsyncIterator[EngineAnswer]:
        """Continue a prompt: yield the partial answer after each step, then the whole answer
        (`ended`) with activations and readings.

        Leaving the loop or cancelling its task aborts the request. It starts when
        the engine's tables of edits have free rows for its interventions.

        Args:
            prompt: a text or tokens.
            max_new_tokens: the largest number of new tokens.
            interventions: the interventions of this request.
            capture, readings, stop_at_eos, prepend_bos, sampling: as for `Engine.generate`.
            adapter_name: the name of its LoRA adapter.

        Raises:
            ValueError, TypeError, IndexError: as for `Engine.generate`, before anything runs.
        """
        if isinstance(interventions, FromAnswers):
            raise TypeError(
                "there are no other answers here: await them, and make the interventions of what"
                " they have"
            )
        prompts: Any = [prompt]
        (request,) = self._engine.requests(
            prompts, max_new_tokens, [interventions], capture, [adapter_name], prepend_bos, readings
        )
        number = next(self._numbers)
        rpc = self._client.collective_rpc
        name = str(number)
        tokens, ticket = self._engine.asked(request, number)
        params = insides.sampling(max_new_tokens, stop_at_eos, True, ticket, sampling)
        adapter = self._engine.adapter(request.adapter)
        await _send(request.readings, self._sent, rpc)
        samples: dict[int, Any] = {}
        async with self._room.holds(request.edit, rpc):
            ended = False
            try:
                running = self._client.generate(tokens, params, name, lora_request=adapter)
                async with aclosing(running) as outputs:
                    async for out in outputs:
                        samples |= {sample.index: sample for sample in out.outputs}
                        ended = out.finished
                        partial = () if ended else list(samples.values())
                        for answer in self._engine.made(request, partial, name, None):
                            yield answer
            finally:
                captured = await _taken(number, rpc) if request.is_captured else {}
            complete = list(samples.values()) if ended else ()
            for answer in self._engine.made(request, complete, name, captured):
                yield answer


async def _send(readings: Sequence[EngineReading], sent: set[str], rpc: Callable[..., Any]) -> None:
    """Send readings to the worker, each once; `sent` has the keys of its readings."""
    if (new := unsent(readings, sent)) is not None:
        await rpc("bridge_read", args=new)
        sent |= {reading.key for reading in readings}


async def _taken(number: int, rpc: Callable[..., Any]) -> dict[str, Tensor]:
    """Take a request's captured activations and readings out of the worker."""
    return tensors_of((await rpc("bridge_take", args=([number],)))[0])


def _salted(prompt: Any, edit: EngineEdit | None) -> Any:
    """Return a client's prompt with a salt: a client may not choose the salt of another edit."""
    own_salt = prompt.get("cache_salt")
    if edit is None and own_salt is None:
        return prompt
    salt = "plain" if edit is None else edit.key
    return {**prompt, "cache_salt": f"{salt} {own_salt or ''}"}


def _served(
    out: Any, prompt: int, number: int, readings: Sequence[EngineReading], captured: Captured
) -> dict[str, object]:
    """Return the readings of an answer as a client receives them: per sample, the results of probes
    and lenses by name.

    Args:
        out: vLLM's output.
        prompt: the number of tokens of the prompt.
        number: the request's number in the names of its captures.
        readings: the readings.
        captured: the worker's results.
    """
    samples = []
    for sample in out.outputs:
        length = prompt + len(sample.token_ids) - 1
        results = results_of(readings, captured, f"{number}/{sample.index}/", length)
        samples.append({name: _plain(vars(result)) for name, result in results.items()})
    return {"readings": samples}


def _plain(result: Mapping[str, float | Tensor]) -> dict[str, object]:
    return {name: x.tolist() if isinstance(x, Tensor) else x for name, x in result.items()}


async def refuse_beams(request: Any, call_next: Any) -> Any:
    """Reject requests whose interventions or readings vLLM would drop: its beam search drops
    ``vllm_xargs``, and readings come with a whole answer to one prompt.

    Args:
        request, call_next: Starlette's middleware arguments.
    """
    if request.method == "POST" and "json" in request.headers.get("content-type", ""):
        body = await request.json()
        if isinstance(body, dict) and (why := _why_dropped(body)):
            message = f"interventions or readings are not available with {why}"
            error = {"message": message, "type": "BadRequestError", "code": 400}
            return insides.json_response({"error": error}, 400)
    return await call_next(request)


def _why_dropped(body: Mapping[str, Any]) -> str:
    """Return why interventions or readings of a request would be dropped; "" if they are not."""
    xargs = body.get("vllm_xargs") or {}
    prompt = body.get("prompt")
    if body.get("use_beam_search") and (_NAME in xargs or _READ in xargs):
        return "use_beam_search"
    if _READ in xargs and body.get("stream"):
        return "stream"
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return "several prompts in one request" if _READ in xargs and several else ""
