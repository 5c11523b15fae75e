"""Requests that come when they like: `AsyncEngine`, and vLLM's OpenAI-compatible server with saved interventions.

A server's request says ``vllm_xargs: {"interventions": "steer.safetensors"}``. The file has to be in a folder that the
server was started with; it is read as data (`bridge.interventions.load`), lowered to rows, and put into the tables
while the request runs. The salt of its prefix is made of what it does, whatever the client says of salts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
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
from bridge.engine.tables import EngineEdit, fit, packed
from bridge.hooks.names import NamesFilter
from bridge.interventions import load
from bridge.run.inputs import HookSpec

#: What a request calls its file.
_NAME = "interventions"


def serve(
    model: str | PathLike[str], points: NamesFilter, folders: Sequence[str | PathLike[str]], *, host: str = "127.0.0.1",
    port: int = 8000, dtype: torch.dtype | None = None, rows: int = 64, rank: int = 1, **options: Any,
) -> None:  # fmt: skip
    """Serves a model until it is interrupted. The points are proved first, in an engine that ends before.

    Args:
        model, points, dtype, rows, rank, options: as for `Engine`; with ``adapters=``, a request's ``model`` is the
            name of one.
        folders: where saved interventions may be; a request names a file in one of them.
        host, port: where the server listens.

    Raises:
        ValueError: a point that is not offered, with the reason; as for `Engine` besides.
        NotADirectoryError: a folder that is none.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise NotADirectoryError(f"folders= names {folder}, which is no folder")
    engine = Engine(model, points, dtype=dtype, rows=rows, rank=rank, **options)
    engine.close()
    if engine.refused:
        name, why = next(iter(engine.refused.items()))
        raise ValueError(f"{name} is not offered in this engine: {why}")
    edits = SavedEdits(engine, folders, rows)
    insides.serve(*engine.started_with, {"host": host, "port": port}, engine.adapters, edits.around)


class EditRoom:
    """Whose rows are in the tables of an engine that many requests come to, each when it likes.

    Args:
        rows: how many rows the tables of a site have.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._there: dict[str, EngineEdit] = {}
        self._running: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def holds(self, edit: EngineEdit, rpc: Callable[..., Any]) -> AsyncIterator[None]:
        """Waits until there are rows for an edit, fills them, and keeps them as long as this is open.

        Args:
            edit: the edit; where it does nothing, it needs no rows.
            rpc: calls the worker.
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
            await self._changed.wait_for(lambda: edit.key in self._there or self._fits(edit))
            if edit.key not in self._there:
                asked_for = {key: there for key, there in self._there.items() if self._running[key]}
                kept = self._there if fit([*self._there.values(), edit], self._rows) else asked_for
                self._there = asked_for  # of the others nothing is known where this fails
                await rpc("bridge_edit", args=packed([*kept.values(), edit]))
                self._there = {**kept, edit.key: edit}
            self._running[edit.key] += 1

    def _fits(self, edit: EngineEdit) -> bool:
        return fit([*(there for key, there in self._there.items() if self._running[key]), edit], self._rows)


class SavedEdits:
    """The saved interventions that requests of a server name.

    Args:
        engine: one that proved the points, and knows their places.
        folders: where files may be.
        rows: how many rows the tables of a site have.
    """

    def __init__(self, engine: Engine, folders: Sequence[str | PathLike[str]], rows: int) -> None:
        self._engine, self._folders = engine, [Path(folder).resolve() for folder in folders]
        self._known: dict[tuple[Path, int, int], EngineEdit] = {}
        self._room = EditRoom(rows)

    def edit(self, name: object) -> EngineEdit:
        """That of a file.

        Args:
            name: of the file, in one of the folders.

        Raises:
            ValueError: there is none, it is elsewhere, or it cannot be had here.
        """
        paths = [(folder / str(name)).resolve() for folder in self._folders]
        found = [p for p, folder in zip(paths, self._folders, strict=True) if p.is_relative_to(folder) and p.is_file()]
        if not isinstance(name, str) or not found:
            raise ValueError(f"there is no file {name!r} in the folders of interventions that are served here")
        stat = found[0].stat()
        key = found[0], stat.st_mtime_ns, stat.st_size
        if key not in self._known:
            try:
                self._known[key] = self._engine.edit(load(found[0], self._engine.bridge))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
        return self._known[key]

    def around(self, client: Any) -> None:
        """Has a client of vLLM's engine look at what its requests name.

        Args:
            client: vLLM's `AsyncLLM`.
        """
        generate, rpc = client.generate, client.collective_rpc

        async def edited(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            said = dict(params.extra_args or {})
            if "bridge" in said:
                raise ValueError("vllm_xargs has 'bridge', which is not for clients")
            edit = self.edit(said.pop(_NAME)) if _NAME in said else None
            own, salt = prompt.get("cache_salt"), "plain" if edit is None else edit.key
            if edit is not None or own is not None:  # nobody chooses the salt of another's edit
                prompt = {**prompt, "cache_salt": f"{salt} {own or ''}"}
            if edit is None:
                async for out in generate(prompt, params, *args, **kwargs):
                    yield out
                return
            try:
                edit.check_prompt(len(prompt["prompt_token_ids"]))
            except IndexError as error:
                raise ValueError(str(error)) from error
            params.extra_args = {**said, "bridge": {"number": 0, "capture": [], "edit": edit.key}}
            async with self._room.holds(edit, rpc):
                async for out in generate(prompt, params, *args, **kwargs):
                    yield out

        client.generate = edited


class AsyncEngine:
    """An `Engine` for a program with an event loop, such as a server of one's own: ``AsyncLLM`` with hook points.

    The points are proved first, in an engine that ends before. Requests come when they like, each with its own edit.

    Args:
        model, points, rows, more: as for `Engine`.

    Attributes:
        bridge, refused: as there.

    Raises:
        VersionError, UnknownHookError, TypeError, ValueError: as there.

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

    def __init__(self, model: str | PathLike[str], points: NamesFilter, *, rows: int = 64, **more: Any) -> None:
        self._engine = Engine(model, points, rows=rows, **more)
        self._engine.close()
        self.bridge, self.refused = self._engine.bridge, self._engine.refused
        self._client = insides.started_async(*self._engine.started_with)
        self._room, self._numbers = EditRoom(rows), count()

    def offered(self) -> list[str]:
        """As of `Engine`."""
        return self._engine.offered()

    def close(self) -> None:
        """Ends the engine's process."""
        self._client.shutdown()

    async def stream(
        self, prompt: str | Sequence[int] | Tensor, max_new_tokens: int, interventions: Sequence[HookSpec] = (),
        capture: NamesFilter = (), *, adapter_name: str | None = None, stop_at_eos: bool = True,
        prepend_bos: bool | None = None, **sampling: Any,
    ) -> AsyncIterator[EngineAnswer]:  # fmt: skip
        """Continues a prompt: what there is after each step, and at last the whole answer (`ended`) with activations.

        Leave the loop, or cancel its task, and the request is aborted. If the tables are full, it waits.

        Args:
            prompt: a text, or tokens.
            max_new_tokens: how many may follow.
            interventions: of this request.
            capture, stop_at_eos, prepend_bos, sampling: as for `Engine.generate`.
            adapter_name: the LoRA adapter that it has.

        Raises:
            ValueError, TypeError, IndexError: as there, before anything is run.
        """
        if isinstance(interventions, FromAnswers):
            raise TypeError("there are no other answers here: await them, and make the interventions of what they have")
        prompts: Any = [prompt]
        asked = self._engine.requests(prompts, max_new_tokens, [interventions], capture, [adapter_name], prepend_bos)
        (request,) = asked
        number, rpc = next(self._numbers), self._client.collective_rpc
        given, ticket = self._engine.asked(request, number)
        params = insides.sampling(max_new_tokens, stop_at_eos, True, ticket, sampling)
        adapter, name, so_far = self._engine.adapter(request.adapter), str(number), dict[int, Any]()
        async with self._room.holds(request.edit, rpc):
            ended = False
            try:
                async with aclosing(self._client.generate(given, params, name, lora_request=adapter)) as outputs:
                    async for out in outputs:
                        so_far |= {one.index: one for one in out.outputs}
                        if not (ended := out.finished):
                            for answer in self._engine.made(request, list(so_far.values()), name, None):
                                yield answer
            finally:
                data = (await rpc("bridge_take", args=([number],)))[0] if request.capture else None
            captured = tensors_of(data) if data is not None else {}
            for answer in self._engine.made(request, list(so_far.values()), name, captured) if ended else ():
                yield answer


async def refuse_beams(request: Any, call_next: Any) -> Any:
    """A step of the server: vLLM's beam search forgets what ``vllm_xargs`` says.

    Args:
        request, call_next: of Starlette.
    """
    if request.method == "POST" and "json" in request.headers.get("content-type", ""):
        body = await request.json()
        if isinstance(body, dict) and body.get("use_beam_search") and _NAME in (body.get("vllm_xargs") or {}):
            said = {
                "message": "interventions cannot be had with use_beam_search",
                "type": "BadRequestError",
                "code": 400,
            }
            return insides.json_response({"error": said}, 400)
    return await call_next(request)
