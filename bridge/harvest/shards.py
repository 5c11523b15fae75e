"""Shards: writing one whole, reading pieces of one without holding it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bridge.harvest.errors import HarvestError
from bridge.harvest.options import FileFormat
from bridge.harvest.packing import ShardInput
from bridge.harvest.rows import ID_COLUMNS
from bridge.harvest.storage import AtomicFile, Folder, ShardRecord, refused

_PIECE_BYTES = 4 * 2**20


def piece_rows(schema: pa.Schema) -> int:
    """How many rows are stored together and read together: about 4 MiB, a power of two, the last piece excepted."""
    row = sum(_row_bytes(field.type) for field in schema)
    return int(min(8192, max(16, 2 ** int(math.log2(max(1, _PIECE_BYTES // row))))))


def _row_bytes(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _row_bytes(kind.value_type)
    return max(1, int(kind.bit_width) // 8)


def shape_of(kind: pa.DataType) -> tuple[list[int], str]:
    """The shape of a column's rows and the name of its numbers' type.

    Args:
        kind: the column's Arrow type.
    """
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(int(kind.list_size))
        kind = kind.value_type
    return shape, {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


class ShardWriter:
    """Writes one shard: nothing is in its place before `finish`.

    Args:
        folder: the harvest's folder.
        shard: what the shard is made from.
        file_format: ``"arrow"`` or ``"parquet"``.
    """

    def __init__(self, folder: Folder, shard: ShardInput, file_format: FileFormat) -> None:
        self.folder, self.shard, self.format = folder, shard, file_format
        self.path = folder.shard(shard.index, file_format)
        self.rows = 0
        self._file: AtomicFile | None = None
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._piece = 0
        self._pending: list[pa.RecordBatch] = []
        self._held = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes rows; those that fill a piece are written.

        Raises:
            WriteError: the system refused.
            HarvestError: other columns than before.
        """
        if self._schema is None:
            self._open(batch.schema)
        elif batch.schema != self._schema:
            raise HarvestError(f"the columns changed within a shard: {self._schema} and then {batch.schema}")
        self._pending.append(batch)
        self._held += batch.num_rows
        self.rows += batch.num_rows
        if self._held >= self._piece:
            self._flush(everything=False)

    def _open(self, schema: pa.Schema) -> None:
        self._schema, self._piece = schema, piece_rows(schema)
        try:
            self._file = AtomicFile(self.path)
            if self.format == "arrow":
                self._writer = pa.ipc.new_file(self._file, schema)
            else:
                self._writer = pq.ParquetWriter(
                    self._file, schema, compression="none", use_dictionary=False, write_statistics=False
                )
        except OSError as error:
            self.abandon()
            raise refused(self.path, error) from error

    def _flush(self, everything: bool) -> None:
        table = pa.Table.from_batches(self._pending, self._schema)
        whole = len(table) if everything else len(table) // self._piece * self._piece
        try:
            for start in range(0, whole, self._piece):
                piece = table.slice(start, min(self._piece, whole - start)).combine_chunks()
                if self.format == "arrow":
                    self._writer.write_table(piece)
                else:
                    self._writer.write_table(piece, row_group_size=self._piece)
        except OSError as error:
            raise refused(self.path, error) from error
        rest = table.slice(whole)
        # A copy: a slice would hold all of it.
        self._pending = rest.combine_chunks().to_batches() if len(rest) else []
        self._held = len(rest)

    def finish(self, batch_size: int) -> ShardRecord:
        """Puts the shard in its place, and its record next to it.

        Args:
            batch_size: the smallest that it was made with.

        Raises:
            WriteError: the system refused.
            HarvestError: there are no rows.
        """
        if self._file is None or self._schema is None:
            raise HarvestError(f"shard {self.shard.index} would have no rows: every token was left out")
        self._flush(everything=True)
        try:
            self._writer.close()
            checksum = self._file.commit()
        except OSError as error:
            raise refused(self.path, error) from error
        activations = [field for field in self._schema if field.name not in ID_COLUMNS]
        shapes = {field.name: shape_of(field.type) for field in activations}
        after = self.shard.after
        record = ShardRecord(
            self.shard.index, self.path.name, self.rows, len(self.shard.lengths), len(self.shard.tokens),
            self._file.size, checksum, self.shard.fingerprint(), after.documents, after.offset, after.source,
            {name: {"shape": shape, "dtype": kind} for name, (shape, kind) in shapes.items()}, batch_size,
        )  # fmt: skip
        self.folder.add(record)
        return record

    def abandon(self) -> None:
        """Takes away what was written."""
        if self._file is not None and not self._file.closed:
            self._file.abandon()


def write_shard(
    folder: Folder, shard: ShardInput, file_format: FileFormat, rows: Iterable[pa.RecordBatch], used: Callable[[], int]
) -> ShardRecord:
    """Writes one shard.

    Args:
        folder: the harvest's folder.
        shard: what it is made from.
        file_format: ``"arrow"`` or ``"parquet"``.
        rows: its record batches.
        used: asked at the end for the batch size that they were made with.
    """
    writer = ShardWriter(folder, shard, file_format)
    try:
        for batch in rows:
            writer.write(batch)
        return writer.finish(used())
    except BaseException:
        writer.abandon()
        raise


class ShardFile:
    """One shard, read piece by piece: of an Arrow file, memory-mapped pages; of a Parquet file, row groups.

    Args:
        path: the file.

    Raises:
        HarvestError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.suffix == ".arrow":
                self._map: Any = pa.memory_map(str(path))
                self._reader: Any = pa.ipc.open_file(self._map)
                self.pieces = int(self._reader.num_record_batches)
            else:
                self._map = None
                self._reader = pq.ParquetFile(path, memory_map=True)
                self.pieces = int(self._reader.num_row_groups)
        except (pa.ArrowInvalid, OSError) as error:
            raise HarvestError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader = None
        if self._map is not None:
            self._map.close()

    def piece(self, index: int, columns: list[str]) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Some columns of one piece, ``[row, ...]``.

        Args:
            index: which piece.
            columns: their names.
        """
        if self.path.suffix == ".arrow":
            batch = self._reader.get_batch(index)
            return {name: to_numpy(batch.column(name)) for name in columns}
        table = self._reader.read_row_group(index, columns=columns)
        return {name: to_numpy(table.column(name).combine_chunks()) for name in columns}

    def count(self) -> int:
        """How many rows it has, by its own account."""
        if self.path.suffix != ".arrow":
            return int(self._reader.metadata.num_rows)
        return sum(self._reader.get_batch(i).num_rows for i in range(self.pieces))


def to_numpy(array: pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """A column as an array ``[row, ...]``, without a copy where its numbers are bytes as they are."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    rows, shape = len(array), []
    while pa.types.is_fixed_size_list(array.type):
        shape.append(int(array.type.list_size))
        array = array.flatten()
    found = array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))
    return np.asarray(found.reshape(rows, *shape))
