"""Shards: writing one whole, reading pieces of one without holding it."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from adapters import kept
from adapters.sealed import sealed, unsealed
from bridge.harvest.fingerprint import HarvestError, WriteError, digest
from bridge.harvest.options import FileFormat
from bridge.harvest.packing import Array, ShardInput
from bridge.harvest.rows import ID_COLUMNS

# ----------------------------------------------------------------------------------------------------------------------
# A harvest's folder: files that appear whole or not at all, the manifest, one record for each whole shard.
# ----------------------------------------------------------------------------------------------------------------------


#: An object of JSON.
Data = dict[str, Any]
FORMAT = "transformer-bridge activations 1"
_MANIFEST, _RECORDS, _TEMPORARY = "manifest.json", "records", ".tmp"


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
    columns: dict[str, Data]
    batch_size: int

    @property
    def note(self) -> str:
        """Where its record is in the harvest's folder."""
        return f"{_RECORDS}/{Path(self.file).stem}.json"


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

    model: Data
    tokenizer: str | None
    options: Data
    versions: dict[str, str]
    source: Data
    quick: Data
    complete: bool = False
    shards: list[ShardRecord] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """The rows, sequences, tokens and bytes of all shards."""
        names = ("rows", "sequences", "tokens", "size")
        return {name: sum(getattr(record, name) for record in self.shards) for name in names}


def checksum_of(path: Path) -> str:
    """The checksum of a file on this machine (XXH3, 128 bits)."""
    total = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(2**22):
            total.update(data)
    return total.hexdigest()


class Folder:
    """The folder of a harvest: on this machine, or in a store that fsspec knows by its URL (``s3://bucket/acts``).

    It holds names alone, so that it can be sent to other processes, which open the store for themselves.

    Args:
        path: the folder, or its URL.
        cache: where shards of a store are kept when they are read; None: beside what else is kept of models.

    Attributes:
        path: as it was given.
        scratch: where files are written before they are in their place: the folder itself, or one on this machine.

    Raises:
        HarvestError: nothing here knows such a URL.
    """

    def __init__(self, path: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> None:
        given = os.fspath(path)
        self.is_local = "://" not in given
        self.path: Path | str = Path(given) if self.is_local else given.rstrip("/")
        self._url = str(self.path)
        if self.is_local:
            self.scratch, self.cache = Path(given), Path(given)
            return
        where = kept.folder()
        ours = Path(tempfile.gettempdir(), f"transformer-bridge-{os.getuid()}") if where is None else where.parent
        self.cache = ours / "shards" if cache is None else Path(cache)
        self.scratch = self.cache / digest(self._url)
        try:
            self._store()
        except (ImportError, ValueError) as error:
            raise HarvestError(f"{given} cannot be opened: {error}") from error

    def _store(self) -> tuple[Any, str]:
        """The file system and the folder's path in it. fsspec keeps one for each thread and process."""
        if self.is_local:
            return fsspec.filesystem("file"), self.address
        store, root = fsspec.url_to_fs(self._url)
        return store, str(root)

    @property
    def address(self) -> str:
        """What another process finds it by."""
        return os.path.abspath(self._url) if self.is_local else self._url

    def shard(self, index: int, suffix: str) -> str:
        """The name of a shard."""
        return f"shard-{index:06d}.{suffix}"

    def sizes(self, under: str = "") -> dict[str, int]:
        """What is there, and how many bytes each has.

        Args:
            under: a folder in this one.
        """
        store, root = self._store()
        place = f"{root}/{under}".rstrip("/")
        store.invalidate_cache()
        try:
            found = store.ls(place, detail=True)
        except FileNotFoundError:
            return {}
        names = ((one["name"].rstrip("/"), int(one["size"] or 0)) for one in found)
        return {PurePosixPath(name).name: size for name, size in names if not place.endswith(name)}

    def remove(self, name: str) -> None:
        """Takes a file away; one that is not there is no error."""
        store, root = self._store()
        with suppress(FileNotFoundError):
            store.rm_file(f"{root}/{name}")

    @contextmanager
    def whole(self, name: str, new: bool = False) -> Iterator[AtomicFile]:
        """A file that is in its place after the ``with`` statement, or not there if that raised.

        Args:
            name: of the file.
            new: refuse to write over one that is there, where the store can.

        Raises:
            WriteError: the system refused to write it.
            FileExistsError: it is there.
        """
        file = None
        try:
            file = AtomicFile(self, name)
            yield file
            file.commit(new)
        except BaseException as error:
            if file is not None:
                file.abandon()
            if isinstance(error, OSError) and not isinstance(error, WriteError | FileExistsError):
                raise refused(name, error) from error
            raise

    # ---- the manifest and the records, each with a checksum of its own

    def _json(self, name: str, data: bytes) -> Data:
        """What a file of ours says.

        Raises:
            HarvestError: it is damaged.
        """
        try:
            return unsealed(data)
        except ValueError as error:
            raise HarvestError(f"{self.path}/{name} is damaged: {error}") from error

    def _write_json(self, name: str, content: Data, new: bool = False) -> None:
        with self.whole(name, new) as file:
            file.write(sealed(content).encode())

    def manifest(self) -> Manifest | None:
        """The manifest, with the records of the whole shards; None where there is none.

        Raises:
            HarvestError: it is no manifest of ours, or damaged.
        """
        store, root = self._store()
        try:
            found = self._json(_MANIFEST, store.cat_file(f"{root}/{_MANIFEST}"))
        except FileNotFoundError:
            return None
        where = f"{self.path}/{_MANIFEST}"
        if found.pop("format", None) != FORMAT:
            raise HarvestError(f"{where} is no manifest of a harvest in the format {FORMAT!r}")
        try:
            totals = found.pop("totals")
            made = Manifest(**{**found, "shards": [ShardRecord(**record) for record in found.pop("shards")]})
            if made.totals() != totals:
                raise ValueError("its totals are not those of its shards")
        except (KeyError, TypeError, ValueError) as error:
            raise HarvestError(f"{where} is damaged: {error}") from error
        if not made.complete:
            records = self.records()
            lost = self.lost(records.values(), checksums=False)
            made.shards = [record for index, record in records.items() if index not in lost]
        return made

    def harvested(self) -> Manifest:
        """The manifest.

        Raises:
            HarvestError: there is none, or none of ours.
        """
        if (found := self.manifest()) is None:
            raise HarvestError(f"{self.path} holds no harvest: it has no manifest.json")
        return found

    def records(self) -> dict[int, ShardRecord]:
        """The records of a harvest that is not finished, by index. One that is damaged is none: its shard is lost."""
        store, root = self._store()
        names = [name for name in self.sizes(_RECORDS) if name.startswith("shard-") and name.endswith(".json")]
        data = store.cat([f"{root}/{_RECORDS}/{name}" for name in names]) if names else {}
        found = []
        for name, read in zip(sorted(names), (data[key] for key in sorted(data)), strict=True):
            with suppress(HarvestError, TypeError):
                found.append(ShardRecord(**self._json(name, read)))
        return {record.index: record for record in sorted(found, key=lambda record: record.index)}

    def write(self, manifest: Manifest, new: bool = False) -> None:
        """Puts a manifest in its place.

        Args:
            manifest: the manifest.
            new: there is none yet.

        Raises:
            HarvestError: there is one, which another process has begun with.
        """
        try:
            self._write_json(_MANIFEST, {"format": FORMAT, "totals": manifest.totals(), **asdict(manifest)}, new)
        except FileExistsError as error:
            raise HarvestError(f"another process began a harvest in {self.path}: make the same call again") from error

    def add(self, record: ShardRecord) -> None:
        """Notes that a shard is whole."""
        self._write_json(record.note, asdict(record))

    def reopen(self, manifest: Manifest) -> None:
        """Makes a finished harvest one that goes on, with a record of every shard. Its source's end stays known."""
        for record in manifest.shards:
            self.add(record)
        manifest.complete, manifest.shards = False, []
        self.write(manifest)

    # ---- whether a shard is as it was written

    def lost(self, records: Iterable[ShardRecord], checksums: bool) -> set[int]:
        """Which shards are not there, or not as they were written, by index.

        Args:
            records: of the shards.
            checksums: read them all, and compare their checksums, too.
        """
        there = self.sizes()
        return {record.index for record in records if self.problem(record, there, checksums)}

    def problem(self, record: ShardRecord, there: dict[str, int], checksum: bool = True) -> str | None:
        """What is wrong with a shard, in words; None: nothing.

        Args:
            record: of the shard.
            there: the sizes of the files that are there.
            checksum: read it, and compare its checksum and the number of its rows, too.
        """
        if record.file not in there:
            return "it is missing"
        if there[record.file] != record.size:
            return f"it has {there[record.file]} bytes in place of {record.size}"
        if not checksum:
            return None
        if self.is_local:
            return _other_bytes(Path(self._url, record.file), record)
        place = self._download(record)
        try:
            return _other_bytes(place, record)
        finally:
            place.unlink()

    def _download(self, record: ShardRecord) -> Path:
        """A copy of a store's shard on this machine, whatever its bytes are."""
        store, root = self._store()
        self.scratch.mkdir(parents=True, exist_ok=True)
        place = self.scratch / f".{uuid.uuid4().hex}{_TEMPORARY}{Path(record.file).suffix}"
        store.get_file(f"{root}/{record.file}", str(place))
        return place

    def opened(self, record: ShardRecord, known: bool) -> ShardFile:
        """A shard to be read. What is read of a store is kept on this machine under its checksum.

        Args:
            record: of the shard.
            known: its checksum was compared before.

        Raises:
            HarvestError: it is not as it was written.
        """
        try:
            if self.is_local:
                place = Path(self._url, record.file)
                wrong = None if known else _other_bytes(place, record)
            else:
                place, wrong = self.cache / f"{record.checksum}{Path(record.file).suffix}", None
                if not (place.exists() and (known or _other_bytes(place, record) is None)):
                    os.replace(self._download(record), place)
                    if wrong := _other_bytes(place, record):
                        place.unlink()
        except FileNotFoundError:
            wrong = "it is missing"
        if wrong:
            raise HarvestError(
                f"{self.path}/{record.file} is damaged: {wrong}. The call of `harvest` that made it makes it again, "
                "with checksums=True"
            )
        return ShardFile(place)

    # ---- who works in it

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps this machine's other harvests out of the folder; the lock goes with the process, however it ends.

        Raises:
            HarvestError: another process is at work in it.
        """
        new = not self.scratch.exists()
        (self.scratch / _RECORDS if self.is_local else self.scratch).mkdir(parents=True, exist_ok=True)
        with open(self.scratch / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HarvestError(f"another process is harvesting into {self.path}") from error
            try:
                yield
            finally:
                if new and self.is_local and not (self.scratch / _MANIFEST).exists():  # refused: leave no trace
                    (self.scratch / ".lock").unlink()
                    (self.scratch / _RECORDS).rmdir()
                    self.scratch.rmdir()

    def strange(self) -> list[str]:
        """What there is in a folder without a manifest that is no harvest's."""
        ours = (".lock", _RECORDS)
        return sorted(name for name in self.sizes() if name not in ours and not name.endswith(_TEMPORARY))

    def clean(self, records: Iterable[ShardRecord]) -> None:
        """Takes away what a killed harvest left unfinished: temporary files, and shards that are not whole.

        Args:
            records: of the whole shards.
        """
        for place in self.scratch.glob(f".*{_TEMPORARY}*"):
            place.unlink()
        known = {record.file for record in records}
        for name in self.sizes():
            if name.startswith("shard-") and name not in known:
                self.remove(name)


def _other_bytes(place: Path, record: ShardRecord) -> str | None:
    """What is wrong with a shard's file on this machine, in words; None: nothing."""
    if (size := place.stat().st_size) != record.size:
        return f"it has {size} bytes in place of {record.size}"
    if (found := checksum_of(place)) != record.checksum:
        return f"its checksum is {found} in place of {record.checksum}"
    with ShardFile(place) as shard:
        rows = shard.count()
    return None if rows == record.rows else f"it has {rows} rows in place of {record.rows}"


class AtomicFile:
    """A file that is written beside its place, or on this machine, and is in its place when it is whole.

    Args:
        folder: the harvest's.
        name: of the file.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.folder, self.name, self.size = folder, name, 0
        self.temporary = folder.scratch / f".{Path(name).name}.{uuid.uuid4().hex}{_TEMPORARY}"
        self._hash = xxhash.xxh3_128()
        folder.scratch.mkdir(parents=True, exist_ok=True)
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

    def commit(self, new: bool = False) -> str:
        """Puts the file in its place, with everything on the disk, and returns its checksum (XXH3, 128 bits).

        Args:
            new: see `Folder.whole`.
        """
        self._file.flush()
        store, root = self.folder._store()
        if self.folder.is_local:
            place = Path(root, self.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.temporary, place)
            _sync_folder(place.parent)
        else:
            self._file.close()
            if new:
                store.pipe_file(f"{root}/{self.name}", self.temporary.read_bytes(), mode="create")
            else:
                store.put_file(str(self.temporary), f"{root}/{self.name}")
            self.temporary.unlink()
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


def refused(name: str, error: OSError) -> WriteError:
    """The error for a file that the system refused to write."""
    return WriteError(
        error.errno,
        f"{name} could not be written ({error.strerror or error}); every shard that was whole stands, and the "
        "same call goes on from there",
        name,
    )


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
        self.name = folder.shard(shard.index, file_format)
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
            self._file = AtomicFile(self.folder, self.name)
            if self.format == "arrow":
                self._writer = pa.ipc.new_file(self._file, schema)
            else:
                self._writer = pq.ParquetWriter(
                    self._file, schema, compression="none", use_dictionary=False, write_statistics=False
                )
        except OSError as error:
            self.abandon()
            raise refused(self.name, error) from error

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
            raise refused(self.name, error) from error
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
            raise refused(self.name, error) from error
        activations = [field for field in self._schema if field.name not in ID_COLUMNS]
        shapes = {field.name: shape_of(field.type) for field in activations}
        after = self.shard.after
        record = ShardRecord(
            self.shard.index, self.name, self.rows, len(self.shard.lengths), len(self.shard.tokens),
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

    def piece(self, index: int, columns: list[str]) -> dict[str, Array]:
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

    def table(self, columns: list[str]) -> pa.Table:
        """Some columns of all its rows: of an Arrow file its own pages, of a Parquet file a copy in memory."""
        return self._reader.read_all().select(columns) if self._map is not None else self._reader.read(columns)

    def count(self) -> int:
        """How many rows it has, by its own account."""
        if self.path.suffix != ".arrow":
            return int(self._reader.metadata.num_rows)
        return sum(self._reader.get_batch(i).num_rows for i in range(self.pieces))


def to_numpy(array: pa.Array) -> Array:
    """A column as an array ``[row, ...]``, without a copy where its numbers are bytes as they are."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    rows, shape = len(array), []
    while pa.types.is_fixed_size_list(array.type):
        shape.append(int(array.type.list_size))
        array = array.flatten()
    found = array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))
    return np.asarray(found.reshape(rows, *shape))
