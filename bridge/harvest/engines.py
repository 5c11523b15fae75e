"""The engine of one process: it writes in a thread while the model computes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from bridge.harvest.fingerprint import HarvestError, WriteError, of_module
from bridge.harvest.options import FileFormat, HarvestOptions, ModelSource
from bridge.harvest.packing import ShardInput
from bridge.harvest.rows import RowMaker
from bridge.harvest.shards import Folder, ShardRecord, ShardWriter, write_shard

#: Called with each whole shard's record and the seconds that it took in the model.
Done = Callable[[ShardRecord, float], None]
_AHEAD = 2  # record batches that wait to be written, at most


def do_in_background(steps: Iterable[Callable[[], object]]) -> None:
    """Does steps in a thread, in their order, while further ones are made; nothing more after an error.

    Args:
        steps: what to do. The next one is made when no more than a few are waiting.

    Raises:
        BaseException: what a step raised; those that have not begun are left undone.
    """
    pool, waiting = ThreadPoolExecutor(1, thread_name_prefix="harvest-writer"), deque[Future[None]]()
    try:
        for step in steps:
            waiting.append(pool.submit(_behind, waiting[-1] if waiting else None, step))
            if len(waiting) > _AHEAD:
                waiting.popleft().result()
        for left in waiting:
            left.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _behind(before: Future[None] | None, step: Callable[[], object]) -> None:
    if before is not None:
        before.result()  # which raises what went wrong there
    step()


def run_local(
    maker: RowMaker, folder: Folder, file_format: FileFormat, shards: Iterable[ShardInput], done: Done
) -> None:
    """Makes shards in this process.

    Args:
        maker: makes the rows.
        folder: where they go.
        file_format: ``"arrow"`` or ``"parquet"``.
        shards: what to make them from.
        done: called for each.
    """
    open_writers: list[ShardWriter] = []

    def finish(writer: ShardWriter, seconds: float, size: int) -> None:
        record = writer.finish(size)
        open_writers.remove(writer)
        done(record, seconds)

    def steps() -> Generator[Callable[[], object], None, None]:
        spent = maker.model_seconds
        for shard in shards:
            writer = ShardWriter(folder, shard, file_format)
            open_writers.append(writer)
            for batch in maker.batches(shard):
                yield partial(writer.write, batch)
            seconds, spent = maker.model_seconds - spent, maker.model_seconds
            yield partial(finish, writer, seconds, maker.batch_size)

    try:
        with closing(steps()) as made:  # which the traceback of an error would hold
            do_in_background(made)
    finally:
        for writer in open_writers:
            writer.abandon()


# ----------------------------------------------------------------------------------------------------------------------
# The engine of many processes or machines: Ray Data hands out shards to a pool of actors.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPool:
    """The workers.

    Attributes:
        workers: how many.
        cpus, gpus: of each (a part of a GPU is possible).
        address: of a Ray cluster; None: one on this machine, unless this process has one already.
    """

    workers: int
    cpus: float
    gpus: float
    address: str | None


class ShardWorker:
    """An actor: it loads the model once, makes the shards it is given, and puts them in the folder itself.

    Args:
        model: where the model comes from; a bridge comes through Ray's object store.
        bridge_ref: that, or None.
        options, batch_size: as for `RowMaker`.
        folder: where shards go; every worker has to see it under this path.
        weights: the fingerprint that the model must have.
        threads: for torch.
    """

    def __init__(
        self, model: ModelSource, bridge_ref: list[Any], options: bytes, batch_size: int, folder: str, weights: str,
        threads: int,
    ) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        if bridge_ref:
            ray = importlib.import_module("ray")
            bridge = ray.get(bridge_ref[0])
        else:
            bridge = model.load()
        if of_module(bridge.original_model) != weights:
            raise HarvestError(
                f"the model {model.name!r} that a worker loaded has other weights than the one this call began with"
            )
        self.options: HarvestOptions = pickle.loads(options)
        self.maker = RowMaker(bridge, self.options, batch_size)
        self.folder = Folder(folder)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Makes the shards of a batch of rows, and returns their records, or the error that we have to say.

        Args:
            rows: ``shard``: what each shard is made from, as bytes.
        """
        records, seconds, errors = [], [], []
        for data in rows["shard"]:
            shard: ShardInput = pickle.loads(data)
            before = self.maker.model_seconds
            record, error = "", b""
            try:
                made = self.maker.batches(shard)
                whole = write_shard(self.folder, shard, self.options.format, made, lambda: self.maker.batch_size)
                record = json.dumps(asdict(whole))
            except (HarvestError, WriteError) as problem:
                error = pickle.dumps(problem)  # Ray would wrap it up
            records.append(record)
            errors.append(error)
            seconds.append(self.maker.model_seconds - before)
        return {"record": records, "seconds": np.array(seconds), "error": np.array(errors, dtype=object)}


def _feed(
    queue: Any, full: type[Exception], shards: Iterable[ShardInput], stopped: threading.Event, fed: Future[set[int]]
) -> None:
    """Puts what shards are made from into a queue, as fast as it is emptied.

    Args:
        queue, full: Ray's, and its error where there is no room.
        shards: what is put there.
        stopped: nobody takes them any more.
        fed: is told at the end which shards these were, or what went wrong.
    """
    given: set[int] = set()
    try:
        for shard in takewhile(lambda _: not stopped.is_set(), shards):
            given.add(shard.index)
            _put(queue, full, pickle.dumps(shard), stopped)
        fed.set_result(given)
    except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for us
        fed.set_exception(error)
    _put(queue, full, None, stopped)


def _put(queue: Any, full: type[Exception], item: bytes | None, stopped: threading.Event) -> None:
    while not stopped.is_set():
        with suppress(full):
            return queue.put(item, timeout=1)  # type: ignore[no-any-return]


def installed() -> Any:
    """The package `ray`.

    Raises:
        HarvestError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise HarvestError('engine="ray" needs Ray: pip install "transformer-bridge[ray]"')
    return importlib.import_module("ray")


def run_ray(
    pool: WorkerPool,
    model: ModelSource,
    options: HarvestOptions,
    batch_size: int,
    folder: Folder,
    weights: str,
    shards: Iterable[ShardInput],
    done: Done,
) -> None:
    """Makes shards on a pool of Ray actors.

    Args:
        pool: the workers.
        model, options, batch_size, weights: as for `ShardWorker`.
        folder: where shards go.
        shards: what to make them from; it is read in this process.
        done: called for each shard.

    Raises:
        HarvestError: there is too little to run on, or a shard was lost with a worker.
    """
    ray = installed()
    started = not ray.is_initialized()
    if started:
        local: dict[str, Any] = {}
        if pool.address is None:
            cpus = max(os.cpu_count() or 1, math.ceil(pool.workers * pool.cpus))
            local = {"num_cpus": cpus, "include_dashboard": False}
        ray.init(address=pool.address, log_to_driver=False, logging_level=logging.WARNING, **local)
    try:
        _check_resources(ray, pool)
        _run(ray, model, options, batch_size, folder, weights, shards, pool, done)
    finally:
        if started:
            ray.shutdown()


def _check_resources(ray: Any, pool: WorkerPool) -> None:
    there = ray.cluster_resources()
    for kind, each in (("CPU", pool.cpus), ("GPU", pool.gpus)):
        if each * pool.workers > there.get(kind, 0):
            raise HarvestError(
                f"{pool.workers} workers with {each:g} {kind} each need {each * pool.workers:g}; "
                f"the Ray cluster has {there.get(kind, 0):g}"
            )


def _run(
    ray: Any, model: ModelSource, options: HarvestOptions, batch_size: int, folder: Folder, weights: str,
    shards: Iterable[ShardInput], pool: WorkerPool, done: Done,
) -> None:  # fmt: skip
    queues, data = importlib.import_module("ray.util.queue"), importlib.import_module("ray.data")
    queue = queues.Queue(maxsize=2 * pool.workers)
    stopped, fed = threading.Event(), Future[set[int]]()
    refs = [] if model.bridge is None else [ray.put(model.bridge)]
    spec = model if model.bridge is None else ModelSource(None, "a bridge", None, None)

    def pull(_: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while (item := queue.get()) is not None:
            yield {"shard": np.array([item], dtype=object)}

    context = data.DataContext.get_current()
    before = context.target_max_block_size, context.enable_progress_bars
    # A block for each shard: nothing waits for others to fill a block with.
    context.target_max_block_size, context.enable_progress_bars = 1, False
    feeding = queue, queues.Full, shards, stopped, fed
    threading.Thread(target=_feed, args=feeding, name="harvest-feeder", daemon=True).start()
    try:
        handed = data.from_items([0]).map_batches(pull, batch_size=1, num_cpus=0)
        made = handed.map_batches(
            ShardWorker,
            batch_size=1,
            compute=data.ActorPoolStrategy(min_size=1, max_size=pool.workers, initial_size=pool.workers),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
            fn_constructor_args=(
                spec, refs, pickle_options(options), batch_size, folder.address, weights,
                max(1, int(pool.cpus)),
            ),
        )  # fmt: skip
        received = set()
        for row in made.iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            record = ShardRecord(**json.loads(row["record"]))
            received.add(record.index)
            done(record, float(row["seconds"]))
    finally:
        stopped.set()
        context.target_max_block_size, context.enable_progress_bars = before
    try:
        lost = sorted(fed.result() - received)
    finally:
        queue.shutdown(force=True)
    if lost:
        raise HarvestError(f"shards {lost} were lost with a worker; the same call makes them")


def pickle_options(options: HarvestOptions) -> bytes:
    """Options as bytes, the user's functions by value."""
    return bytes(importlib.import_module("ray.cloudpickle").dumps(options))
