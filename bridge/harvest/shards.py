"""Shards: writing one whole, reading pieces of one without holding it."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bridge.harvest.fingerprint import HarvestError, WriteError
from bridge.harvest.options import FileFormat
from bridge.harvest.packing import ShardInput
from bridge.harvest.rows import ID_COLUMNS

# ----------------------------------------------------------------------------------------------------------------------
# A harvest's folder: files that appear whole or not at all, the manifest, one record for each whole shard.
# ----------------------------------------------------------------------------------------------------------------------


FORMAT = "transformer-bridge activations 1"
_TEMPORARY = ".tmp"


class AtomicFile:
    """A file that is written next to its final path and renamed when it is complete.

    Args:
        path: its place.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_TEMPORARY}")
        self.size = 0
        self._hash = xxhash.xxh3_128()
        self._file: BinaryIO = open(self.temporary, "wb")  # noqa: SIM115

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._file.closed

    def write(self, data: Any) -> int:
        """Writes bytes, and takes them into the checksum."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """How far it is written."""
        return self.size

    def flush(self) -> None:
        """Hands what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """What pyarrow calls when it is done; `commit` and `abandon` are what closes."""

    def commit(self) -> str:
        """Puts the file in its place, with everything on the disk, and returns its checksum (XXH3, 128 bits)."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.temporary, self.path)
        _sync_folder(self.path.parent)
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Takes the unfinished file away."""
        try:
            self._file.close()  # this flushes, which a full disk refuses once more
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
        finally:
            self.temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole(path: Path) -> Iterator[AtomicFile]:
    """A file that is in its place after the ``with`` statement, or not there if that raised.

    Args:
        path: its place.

    Raises:
        WriteError: the system refused to write it.
    """
    file = None
    try:
        file = AtomicFile(path)
        yield file
        file.commit()
    except BaseException as error:
        if file is not None:
            file.abandon()
        if isinstance(error, OSError) and not isinstance(error, WriteError):
            raise refused(path, error) from error
        raise


def refused(path: Path, error: OSError) -> WriteError:
    """The error for a file that the system refused to write."""
    return WriteError(
        error.errno,
        f"{path.name} could not be written ({error.strerror or error}); every shard that was whole stands, and the "
        "same call goes on from there",
        str(path),
    )


@dataclass(frozen=True)
class ShardRecord:
    """What is known of one whole shard.

    Attributes:
        index: its place among the shards.
        file: its name.
        rows, sequences, tokens: how many rows it has, and the model's inputs and tokens that they are from.
        size, checksum: of the file: bytes, and XXH3 (128 bits).
        input: the fingerprint of the tokens that it was made from.
        documents, offset, source: where the source stood after it: this many documents used up and this far into the
            next one (tokens), and the fingerprint of those documents.
        columns: type and shape of each activation's column.
        batch_size: sequences in one forward pass, the smallest that was used.
    """

    index: int
    file: str
    rows: int
    sequences: int
    tokens: int
    size: int
    checksum: str
    input: str
    documents: int
    offset: int
    source: str
    columns: dict[str, dict[str, Any]]
    batch_size: int


@dataclass
class Manifest:
    """What a harvest is.

    Attributes:
        model: its name, class and fingerprints (see `fingerprint.of_model`).
        tokenizer: its fingerprint; None where there is none.
        options: everything else that decides the rows.
        versions: of this library and of those that computed.
        source: what the rows are from: in words, by identity and, once it is finished, how far it was used up.
        quick: what tells the same call without loading the model.
        complete: whether it is finished.
        shards: the records of all whole shards, once it is finished.
    """

    model: dict[str, Any]
    tokenizer: str | None
    options: dict[str, Any]
    versions: dict[str, str]
    source: dict[str, Any]
    quick: dict[str, Any]
    complete: bool = False
    shards: list[ShardRecord] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """The rows, sequences, tokens and bytes of all shards."""
        names = ("rows", "sequences", "tokens", "size")
        return {name: sum(getattr(record, name) for record in self.shards) for name in names}


class Folder:
    """The folder of a harvest.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.records = self.path / "records"

    def shard(self, index: int, suffix: str) -> Path:
        """The place of a shard."""
        return self.path / f"shard-{index:06d}.{suffix}"

    def manifest(self) -> Manifest | None:
        """The manifest, with the records of the whole shards; None where there is none.

        Raises:
            HarvestError: it is no manifest of ours.
        """
        place = self.path / "manifest.json"
        if not place.exists():
            return None
        try:
            found = json.loads(place.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise HarvestError(f"{place} is damaged: {error}") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise HarvestError(f"{place} is no manifest of a harvest in the format {FORMAT!r}")
        found.pop("totals")
        shards = [ShardRecord(**record) for record in found.pop("shards")]
        if not found["complete"]:
            shards = self.whole_shards()
        return Manifest(**found, shards=shards)

    def harvested(self) -> Manifest:
        """The manifest.

        Raises:
            HarvestError: there is none, or none of ours.
        """
        if (found := self.manifest()) is None:
            raise HarvestError(f"{self.path} holds no harvest: it has no manifest.json")
        return found

    def whole_shards(self) -> list[ShardRecord]:
        """The records of the shards that are there in full, by index."""
        found = []
        for place in sorted(self.records.glob("shard-*.json")):
            record = ShardRecord(**json.loads(place.read_text(encoding="utf-8")))
            shard = self.path / record.file
            if shard.exists() and shard.stat().st_size == record.size:
                found.append(record)
        return sorted(found, key=lambda record: record.index)

    def write(self, manifest: Manifest) -> None:
        """Puts a manifest in its place."""
        content = {"format": FORMAT, "totals": manifest.totals(), **asdict(manifest)}
        self._write_json(self.path / "manifest.json", content)

    def add(self, record: ShardRecord) -> None:
        """Notes that a shard is whole."""
        self._write_json(self.records / (Path(record.file).stem + ".json"), asdict(record))

    @staticmethod
    def _write_json(place: Path, content: dict[str, Any]) -> None:
        with whole(place) as file:
            file.write(json.dumps(content, indent=1).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other harvests out of the folder; the lock goes with the process, however it ends.

        Raises:
            HarvestError: another process is at work in it.
        """
        new = not self.path.exists()
        self.records.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HarvestError(f"another process is harvesting into {self.path}") from error
            try:
                yield
            finally:
                if new and not (self.path / "manifest.json").exists():  # it was refused: leave no trace
                    (self.path / ".lock").unlink()
                    self.records.rmdir()
                    self.path.rmdir()

    def clean(self) -> None:
        """Takes away what a killed harvest left unfinished: temporary files, and shards without a record."""
        for place in (*self.path.glob(f".*{_TEMPORARY}"), *self.records.glob(f".*{_TEMPORARY}")):
            place.unlink()
        known = {record.file for record in self.whole_shards()}
        for place in self.path.glob("shard-*.*"):
            if place.name not in known:
                place.unlink()


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
