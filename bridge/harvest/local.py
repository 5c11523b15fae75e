"""The engine of one process: it writes in a thread while the model computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from bridge.harvest.options import FileFormat
from bridge.harvest.packing import ShardInput
from bridge.harvest.rows import RowMaker
from bridge.harvest.shards import ShardWriter
from bridge.harvest.storage import Folder, ShardRecord

#: Called with each whole shard's record and the seconds that it took in the model.
Done = Callable[[ShardRecord, float], None]
_AHEAD = 2  # record batches that wait to be written, at most


class BackgroundWriter:
    """One thread that writes in the order in which it is told, and nothing more after an error."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="harvest-writer")
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def do(self, step: Callable[[], None]) -> None:
        """Has something done behind what was asked before; waits where too much is waiting.

        Raises:
            BaseException: what an earlier step raised.
        """
        self._waiting.append(self._pool.submit(self._guarded, step))
        while len(self._waiting) > _AHEAD:
            self._waiting.popleft().result()

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            step()
        except BaseException:
            self._failed = True
            raise

    def wait(self) -> None:
        """Until everything is done.

        Raises:
            BaseException: what a step raised.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Ends the thread; what has not begun is left undone."""
        self._failed = True
        self._pool.shutdown(wait=True)


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
    background = BackgroundWriter()
    open_writers: list[ShardWriter] = []
    spent = maker.model_seconds
    try:
        for shard in shards:
            writer = ShardWriter(folder, shard, file_format)
            open_writers.append(writer)
            for batch in maker.batches(shard):
                background.do(lambda writer=writer, batch=batch: writer.write(batch))  # type: ignore[misc]
            seconds, spent = maker.model_seconds - spent, maker.model_seconds

            def finish(writer: ShardWriter = writer, seconds: float = seconds, size: int = maker.batch_size) -> None:
                record = writer.finish(size)
                open_writers.remove(writer)
                done(record, seconds)

            background.do(finish)
        background.wait()
    finally:
        background.close()
        for writer in open_writers:
            writer.abandon()
