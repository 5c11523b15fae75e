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
from contextlib import closing, contextmanager, suppress
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
#: Called for each batch that is written, with its shard, its tokens, and the seconds that it took
#: in the model.
Ran = Callable[[ShardInput, int, float], None]
_AHEAD = 2  # record batches that wait to be written, at most


def do_in_background(steps: Iterable[Callable[[], object]]) -> None:
    """Run steps in a thread, in order, while the next ones are created; stop after an error.

    Args:
        steps: the functions to call. The next one is requested when only a few are waiting.

    Raises:
        BaseException: the error of a step; later steps are not run.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="harvest-writer")
    waiting = deque[Future[None]]()
    try:
        for step in steps:
            before = waiting[-1] if waiting else None
            waiting.append(pool.submit(_run_after, before, step))
            if len(waiting) > _AHEAD:
                waiting.popleft().result()
        for step_result in waiting:
            step_result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_after(before: Future[None] | None, step: Callable[[], object]) -> None:
    if before is not None:
        before.result()  # which raises what went wrong there
    step()


def run_local(
    maker: RowMaker,
    folder: Folder,
    file_format: FileFormat,
    shards: Iterable[ShardInput],
    done: Done,
    ran: Ran,
) -> None:
    """Write shards in this process.

    Args:
        maker: makes the rows.
        folder: the folder for the shards.
        file_format: ``"arrow"`` or ``"parquet"``.
        shards: the inputs of each shard.
        done: called after each shard.
        ran: called after each batch.
    """
    open_writers: list[ShardWriter] = []

    def finish(writer: ShardWriter, seconds: float, size: int) -> None:
        record = writer.finish(size)
        open_writers.remove(writer)
        done(record, seconds)

    def write(writer: ShardWriter, batch: Any, shard: ShardInput, *spent: Any) -> None:
        writer.write(batch)
        ran(shard, *spent)

    def steps() -> Generator[Callable[[], object], None, None]:
        spent = maker.model_seconds
        for shard in shards:
            writer = ShardWriter(folder, shard, file_format)
            open_writers.append(writer)
            tokens, seconds = 0, maker.model_seconds
            for batch in maker.batches(shard):
                of_batch = maker.tokens_run - tokens, maker.model_seconds - seconds
                tokens, seconds = maker.tokens_run, maker.model_seconds
                yield partial(write, writer, batch, shard, *of_batch)
            yield partial(finish, writer, maker.model_seconds - spent, maker.batch_size)
            spent = maker.model_seconds

    try:
        # Closed, for the traceback of an error would keep the generator alive.
        with closing(steps()) as generator:
            do_in_background(generator)
    finally:
        for writer in open_writers:
            writer.abandon()


# --------------------------------------------------------------------------------------------------
# The engine of many processes or machines: Ray Data hands out shards to a pool of actors.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPool:
    """The workers.

    Attributes:
        workers: the number of workers.
        cpus, gpus: the number per worker (a fraction of a GPU is possible).
        address: the address of a Ray cluster; None: a cluster on this machine, unless this process
            is already connected to one.
    """

    workers: int
    cpus: float
    gpus: float
    address: str | None


class _ShardWorker:
    """An actor that loads the model once, and writes shards into the folder.

    Args:
        model: the origin of the model; a bridge is passed through Ray's object store.
        bridge_ref: the bridge in the object store, or None.
        options, batch_size: as for `RowMaker`.
        folder: the folder for the shards, which every worker must be able to access under this
            path.
        weights: the fingerprint that the model must have.
        threads: the number of threads for torch.
    """

    def __init__(
        self,
        model: ModelSource,
        bridge_ref: list[Any],
        options: bytes,
        batch_size: int,
        folder: str,
        weights: str,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        if bridge_ref:
            ray = importlib.import_module("ray")
            bridge = ray.get(bridge_ref[0])
        else:
            bridge = model.load()
        if of_module(bridge.original_model) != weights:
            raise HarvestError(
                f"the model {model.name!r} that a worker loaded has other weights than the one this"
                " call began with"
            )
        self.options: HarvestOptions = pickle.loads(options)
        self.maker = RowMaker(bridge, self.options, batch_size)
        self.folder = Folder(folder)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Write a shard; return its record, or the error.

        Args:
            rows: ``shard``: the shard's inputs, as bytes.
        """
        (data,) = rows["shard"]
        shard: ShardInput = pickle.loads(data)
        before = self.maker.model_seconds
        record, error = "", b""
        try:
            batches = self.maker.batches(shard)
            size = lambda: self.maker.batch_size
            written = write_shard(self.folder, shard, self.options.format, batches, size)
            record = json.dumps(asdict(written))
        except (HarvestError, WriteError) as problem:
            error = pickle.dumps(problem)  # Ray would wrap it up
        return {
            "record": [record],
            "seconds": np.array([self.maker.model_seconds - before]),
            "error": np.array([error], dtype=object),
        }


def _feed(
    queue: Any,
    full: type[Exception],
    shards: Iterable[ShardInput],
    stopped: threading.Event,
    fed: Future[set[int]],
) -> None:
    """Put the inputs of shards into a queue as soon as it has space.

    Args:
        queue, full: Ray's queue, and the error that it raises when it is full.
        shards: the inputs of the shards.
        stopped: set when the queue is no longer read.
        fed: receives the numbers of these shards at the end, or the error.
    """
    indices: set[int] = set()
    try:
        for shard in takewhile(lambda _: not stopped.is_set(), shards):
            indices.add(shard.index)
            _put(queue, full, pickle.dumps(shard), stopped)
        fed.set_result(indices)
    except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for us
        fed.set_exception(error)
    _put(queue, full, None, stopped)


def _put(queue: Any, full: type[Exception], item: bytes | None, stopped: threading.Event) -> None:
    while not stopped.is_set():
        with suppress(full):
            return queue.put(item, timeout=1)  # type: ignore[no-any-return]


def installed() -> Any:
    """Return the package `ray`.

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
    ran: Ran,
) -> None:
    """Write shards on a pool of Ray actors.

    Args:
        pool: the workers.
        model, options, batch_size, weights: as for `_ShardWorker`.
        folder: the folder for the shards.
        shards: the inputs of each shard, read in this process.
        done: called for each shard.
        ran: not called: an actor reports whole shards.

    Raises:
        HarvestError: the cluster has too few resources, or a shard was lost with a worker.
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
        refs: list[Any] = []
        if model.bridge is not None:  # it goes through Ray's object store
            refs = [ray.put(model.bridge)]
            model = ModelSource(None, "a bridge", None, None)
        threads = max(1, int(pool.cpus))
        # The user's functions by value.
        pickled = importlib.import_module("ray.cloudpickle").dumps(options)
        arguments = model, refs, bytes(pickled), batch_size, folder.address, weights, threads
        _run(pool, arguments, shards, done)
    finally:
        if started:
            ray.shutdown()


def _check_resources(ray: Any, pool: WorkerPool) -> None:
    resources = ray.cluster_resources()
    for kind, amount in (("CPU", pool.cpus), ("GPU", pool.gpus)):
        needed, available = amount * pool.workers, resources.get(kind, 0)
        if needed > available:
            raise HarvestError(
                f"{pool.workers} workers with {amount:g} {kind} each need {needed:g}; "
                f"the Ray cluster has {available:g}"
            )


def _run(
    pool: WorkerPool, arguments: tuple[Any, ...], shards: Iterable[ShardInput], done: Done
) -> None:
    """Feed shards to actors, and collect their records.

    Args:
        arguments: the arguments of `_ShardWorker`.
        pool, shards, done: as for `run_ray`.
    """
    queues = importlib.import_module("ray.util.queue")
    data = importlib.import_module("ray.data")
    queue = queues.Queue(maxsize=2 * pool.workers)
    stopped, fed = threading.Event(), Future[set[int]]()
    feeding = queue, queues.Full, shards, stopped, fed
    threading.Thread(target=_feed, args=feeding, name="harvest-feeder", daemon=True).start()
    received = set()
    try:
        with _one_block_each(data):
            for row in _results(data, queue, pool, arguments).iter_rows():
                if row["error"]:
                    raise pickle.loads(row["error"])
                record = ShardRecord(**json.loads(row["record"]))
                received.add(record.index)
                done(record, float(row["seconds"]))
    finally:
        stopped.set()
    try:
        lost = sorted(fed.result() - received)
    finally:
        queue.shutdown(force=True)
    if lost:
        raise HarvestError(f"shards {lost} were lost with a worker; the same call makes them")


def _results(data: Any, queue: Any, pool: WorkerPool, arguments: tuple[Any, ...]) -> Any:
    """Return a Ray data set that makes the shards of a queue: a row for each, lazily.

    Args:
        data: the module `ray.data`.
        queue: the inputs of shards, as bytes; None ends them.
        pool, arguments: as for `_run`.
    """

    def pull(_: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while (item := queue.get()) is not None:
            yield {"shard": np.array([item], dtype=object)}

    n = pool.workers
    inputs = data.from_items([0]).map_batches(pull, batch_size=1, num_cpus=0)
    return inputs.map_batches(
        _ShardWorker,
        batch_size=1,
        compute=data.ActorPoolStrategy(min_size=1, max_size=n, initial_size=n),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
        fn_constructor_args=arguments,
    )


@contextmanager
def _one_block_each(data: Any) -> Iterator[None]:
    """Make Ray Data use one block per shard, so that no shard waits for others, and hide its
    progress bars."""
    context = data.DataContext.get_current()
    before = context.target_max_block_size, context.enable_progress_bars
    context.target_max_block_size, context.enable_progress_bars = 1, False
    try:
        yield
    finally:
        context.target_max_block_size, context.enable_progress_bars = before
