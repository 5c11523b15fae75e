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

# --------------------------------------------------------------------------------------------------
# A harvest's folder: files that appear whole or not at all, the manifest, one record for each whole
# shard.
# --------------------------------------------------------------------------------------------------


#: An object of JSON.
Data = dict[str, Any]
FORMAT = "transformer-bridge activations 1"
_MANIFEST, _RECORDS, _TEMPORARY = "manifest.json", "records", ".tmp"


@dataclass(frozen=True)
class ShardRecord:
    """The record of one complete shard.

    Attributes:
        index: its index among the shards.
        file: the name of its file.
        rows, sequences, tokens: the number of its rows, and of the model's inputs and tokens from
            which they were made.
        size, checksum: the size of the file in bytes, and its XXH3 hash (128 bits).
        input: the fingerprint of the tokens from which it was made.
        documents, offset, source: the place in the source after it: the number of finished
            documents, the position in the next one (in tokens), and the fingerprint of the finished
            documents.
        columns: the dtype and shape of each activation's column.
        batch_size: the smallest number of sequences in one forward pass.
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
        """The file name of its record in the harvest's folder."""
        return f"{_RECORDS}/{Path(self.file).stem}.json"


@dataclass
class Manifest:
    """The description of a harvest.

    Attributes:
        model: its name, class and fingerprints (see `fingerprint.of_model`).
        tokenizer: its fingerprint; None without one.
        options: all options that determine the rows.
        versions: the versions of this library and of its dependencies.
        source: the source's description, its identity and, once it is finished, its end.
        quick: a fingerprint of the call, computed without loading the model.
        complete: whether it is finished.
        shards: the records of all complete shards, once it is finished.
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
        """Return the rows, sequences, tokens and bytes of all shards."""
        totals = dict.fromkeys(("rows", "sequences", "tokens", "size"), 0)
        for record in self.shards:
            for name in totals:
                totals[name] += getattr(record, name)
        return totals


def checksum_of(path: Path) -> str:
    """Return the checksum of a local file (XXH3, 128 bits)."""
    total = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(2**22):
            total.update(data)
    return total.hexdigest()


class Folder:
    """The folder of a harvest: on this machine, or in a store that fsspec knows by its URL
    (``s3://bucket/acts``).

    It contains only names, so that it can be sent to other processes, which open the store
    themselves.

    Args:
        path: the folder, or its URL.
        cache: the folder in which shards of a store are cached when they are read; None: a folder
            in this library's cache.

    Attributes:
        path: the path as passed.
        scratch: the folder for files that are being written: the folder itself, or one on this
            machine.

    Raises:
        HarvestError: a URL of an unknown kind.
    """

    def __init__(
        self, path: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None
    ) -> None:
        location = os.fspath(path)
        self.is_local = "://" not in location
        self.path: Path | str = Path(location) if self.is_local else location.rstrip("/")
        self._url = str(self.path)
        if self.is_local:
            self.scratch = self.cache = Path(location)
            return
        declarations = kept.folder()
        if cache is not None:
            self.cache = Path(cache)
        elif declarations is not None:
            self.cache = declarations.parent / "shards"
        else:
            user = f"transformer-bridge-{os.getuid()}"
            self.cache = Path(tempfile.gettempdir(), user, "shards")
        self.scratch = self.cache / digest(self._url)
        try:
            self._store()
        except (ImportError, ValueError) as error:
            raise HarvestError(f"{location} cannot be opened: {error}") from error

    def _store(self) -> tuple[Any, str]:
        """Return the file system and the folder's path in it. fsspec keeps one for each thread and
        process.
        """
        if self.is_local:
            return fsspec.filesystem("file"), self.address
        store, root = fsspec.url_to_fs(self._url)
        return store, str(root)

    @property
    def address(self) -> str:
        """An absolute path or URL that other processes can open."""
        return os.path.abspath(self._url) if self.is_local else self._url

    def sizes(self, under: str = "") -> dict[str, int]:
        """Map each file name to its size in bytes.

        Args:
            under: a folder in this one.
        """
        store, root = self._store()
        place = f"{root}/{under}".rstrip("/")
        store.invalidate_cache()
        try:
            entries = store.ls(place, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for entry in entries:
            path = entry["name"].rstrip("/")
            if not place.endswith(path):
                sizes[PurePosixPath(path).name] = int(entry["size"] or 0)
        return sizes

    def remove(self, name: str) -> None:
        """Remove a file; a missing file is not an error."""
        store, root = self._store()
        with suppress(FileNotFoundError):
            store.rm_file(f"{root}/{name}")

    @contextmanager
    def whole(self, name: str, new: bool = False) -> Iterator[AtomicFile]:
        """Open a file that appears under its name only after the ``with`` statement, and not at all
        if that raises.

        Args:
            name: the file's name.
            new: do not overwrite an existing file, if the store supports that.

        Raises:
            WriteError: the system refused to write it.
            FileExistsError: the file exists.
        """
        file = None
        try:
            with raising_write_errors(name):
                file = AtomicFile(self, name)
                yield file
                file.commit(new)
        except BaseException:
            if file is not None:
                file.abandon()
            raise

    # ---- the manifest and the records, each with a checksum of its own

    def _json(self, name: str, data: bytes) -> Data:
        """Return the content of a JSON file that this library wrote.

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
        """Return the manifest, with the records of the complete shards; None if there is none.

        Raises:
            HarvestError: the manifest is damaged, or does not describe a harvest.
        """
        store, root = self._store()
        try:
            content = self._json(_MANIFEST, store.cat_file(f"{root}/{_MANIFEST}"))
        except FileNotFoundError:
            return None
        if content.pop("format", None) != FORMAT:
            raise HarvestError(
                f"{self.path}/{_MANIFEST} does not describe a harvest in the format {FORMAT!r}"
            )
        try:
            totals = content.pop("totals")
            shards = [ShardRecord(**record) for record in content.pop("shards")]
            manifest = Manifest(**content, shards=shards)
            if manifest.totals() != totals:
                raise ValueError("its totals are not those of its shards")
        except (KeyError, TypeError, ValueError) as error:
            raise HarvestError(f"{self.path}/{_MANIFEST} is damaged: {error}") from error
        if not manifest.complete:
            records = self.records().values()
            lost = self.problems(records, checksums=False)
            manifest.shards = [record for record in records if record.file not in lost]
        return manifest

    def harvested(self) -> Manifest:
        """Return the manifest.

        Raises:
            HarvestError: there is no manifest, or it does not describe a harvest.
        """
        manifest = self.manifest()
        if manifest is None:
            raise HarvestError(f"{self.path} holds no harvest: it has no manifest.json")
        return manifest

    def records(self) -> dict[int, ShardRecord]:
        """Return the records of an unfinished harvest, by index, without damaged ones."""
        store, root = self._store()
        paths = []
        for name in self.sizes(_RECORDS):
            if name.startswith("shard-") and name.endswith(".json"):
                paths.append(f"{root}/{_RECORDS}/{name}")
        contents = store.cat(paths) if paths else {}
        records = {}
        for path, data in sorted(contents.items()):
            with suppress(HarvestError, TypeError):
                record = ShardRecord(**self._json(path, data))
                records[record.index] = record
        return dict(sorted(records.items()))

    def write(self, manifest: Manifest, new: bool = False) -> None:
        """Write a manifest.

        Args:
            manifest: the manifest.
            new: require that there is no manifest yet.

        Raises:
            HarvestError: there is one already, written by another process.
        """
        try:
            content = {"format": FORMAT, "totals": manifest.totals(), **asdict(manifest)}
            self._write_json(_MANIFEST, content, new)
        except FileExistsError as error:
            raise HarvestError(
                f"another process began a harvest in {self.path}: make the same call again"
            ) from error

    def add(self, record: ShardRecord) -> None:
        """Write the record of a complete shard."""
        self._write_json(record.note, asdict(record))

    def reopen(self, manifest: Manifest) -> None:
        """Reopen a finished harvest: write one record per shard, and keep the end of the source."""
        for record in manifest.shards:
            self.add(record)
        manifest.complete, manifest.shards = False, []
        self.write(manifest)

    # ---- whether a shard is as it was written

    def problems(self, records: Iterable[ShardRecord], checksums: bool) -> dict[str, str]:
        """Return a description of the problem for each shard that is missing or differs from its
        record, by file.

        Args:
            records: the records of the shards.
            checksums: also read all shards, and compare their checksums and numbers of rows.
        """
        sizes = self.sizes()
        problems = {}
        for record in records:
            if record.file not in sizes:
                problem: str | None = "it is missing"
            elif sizes[record.file] != record.size:
                problem = f"it has {sizes[record.file]} bytes in place of {record.size}"
            else:
                problem = self._read_difference(record) if checksums else None
            if problem:
                problems[record.file] = problem
        return problems

    def _read_difference(self, record: ShardRecord) -> str | None:
        """Read a shard and describe how it differs from its record; None if it does not."""
        if self.is_local:
            return _difference(Path(self._url, record.file), record)
        copy = self._download(record)
        try:
            return _difference(copy, record)
        finally:
            copy.unlink()

    def _download(self, record: ShardRecord) -> Path:
        """Return a local copy of a store's shard, damaged or not."""
        store, root = self._store()
        self.scratch.mkdir(parents=True, exist_ok=True)
        copy = self.scratch / f".{uuid.uuid4().hex}{_TEMPORARY}{Path(record.file).suffix}"
        store.get_file(f"{root}/{record.file}", str(copy))
        return copy

    def opened(self, record: ShardRecord, known: bool) -> ShardFile:
        """Open a shard. Shards of a store are cached on this machine under their checksum.

        Args:
            record: the shard's record.
            known: whether its checksum was already compared.

        Raises:
            HarvestError: it has changed since it was written.
        """
        try:
            if self.is_local:
                path = Path(self._url, record.file)
                problem = None if known else _difference(path, record)
            else:
                path = self.cache / f"{record.checksum}{Path(record.file).suffix}"
                problem = self._cache(record, path, known)
        except FileNotFoundError:
            problem = "it is missing"
        if problem:
            raise HarvestError(
                f"{self.path}/{record.file} is damaged: {problem}. The call of `harvest` that made"
                " it makes it again, with checksums=True"
            )
        return ShardFile(path)

    def _cache(self, record: ShardRecord, path: Path, known: bool) -> str | None:
        """Download a shard of a store if it is not cached yet; describe what is wrong with it, if
        anything."""
        if path.exists() and (known or _difference(path, record) is None):
            return None
        os.replace(self._download(record), path)
        problem = _difference(path, record)
        if problem:
            path.unlink()
        return problem

    # ---- who works in it

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other harvests on this machine; the lock ends with the process.

        Raises:
            HarvestError: another process is using the folder.
        """
        new = not self.scratch.exists()
        records = self.scratch / _RECORDS
        (records if self.is_local else self.scratch).mkdir(parents=True, exist_ok=True)
        lock = self.scratch / ".lock"
        with open(lock, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HarvestError(f"another process is harvesting into {self.path}") from error
            try:
                yield
            finally:
                # After an error at the beginning, leave no trace.
                if new and self.is_local and not (self.scratch / _MANIFEST).exists():
                    lock.unlink()
                    records.rmdir()
                    self.scratch.rmdir()

    def strange(self) -> list[str]:
        """Return the names of foreign files in a folder without a manifest."""
        foreign = []
        for name in self.sizes():
            if name not in (".lock", _RECORDS) and not name.endswith(_TEMPORARY):
                foreign.append(name)
        return sorted(foreign)

    def clean(self, records: Iterable[ShardRecord]) -> None:
        """Remove temporary files and incomplete shards of a killed harvest.

        Args:
            records: the records of the complete shards.
        """
        for path in self.scratch.glob(f".*{_TEMPORARY}*"):
            path.unlink()
        known = {record.file for record in records}
        for name in self.sizes():
            if name.startswith("shard-") and name not in known:
                self.remove(name)


def _difference(path: Path, record: ShardRecord) -> str | None:
    """Describe how a shard's local file differs from its record; None if it does not."""
    if (size := path.stat().st_size) != record.size:
        return f"it has {size} bytes in place of {record.size}"
    if (checksum := checksum_of(path)) != record.checksum:
        return f"its checksum is {checksum} in place of {record.checksum}"
    with ShardFile(path) as shard:
        rows = shard.count()
    return None if rows == record.rows else f"it has {rows} rows in place of {record.rows}"


@contextmanager
def raising_write_errors(name: str) -> Iterator[None]:
    """Raise a `WriteError` if the system refuses to write a file inside the ``with`` statement.

    Args:
        name: the file's name.
    """
    try:
        yield
    except (WriteError, FileExistsError):
        raise
    except OSError as error:
        raise WriteError(
            error.errno,
            f"{name} could not be written ({error.strerror or error}); every shard that was whole"
            " stands, and the same call goes on from there",
            name,
        ) from error


class AtomicFile:
    """A file that is written elsewhere, and moved to its place when it is complete.

    Args:
        folder: the harvest's folder.
        name: the file's name.

    Attributes:
        size: the number of bytes so far.
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
        """Write bytes, and add them to the checksum."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self.size

    def flush(self) -> None:
        """Pass buffered data to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Do nothing: pyarrow calls this at its end, and `commit` and `abandon` close the file."""

    def commit(self, new: bool = False) -> str:
        """Flush the file to disk, move it to its place, and return its checksum (XXH3, 128 bits).

        Args:
            new: see `Folder.whole`.
        """
        self._file.flush()
        store, root = self.folder._store()
        path = f"{root}/{self.name}"
        if self.folder.is_local:
            parent = Path(path).parent
            parent.mkdir(parents=True, exist_ok=True)
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.temporary, path)
            _sync_folder(parent)
        else:
            self._file.close()
            if new:
                store.pipe_file(path, self.temporary.read_bytes(), mode="create")
            else:
                store.put_file(str(self.temporary), path)
            self.temporary.unlink()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Remove the unfinished file."""
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


# --------------------------------------------------------------------------------------------------
# Shards: record batches in files, written and read in pieces.
# --------------------------------------------------------------------------------------------------


_PIECE_BYTES = 4 * 2**20
#: Names of floating-point types, by Arrow's names.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def piece_rows(schema: pa.Schema) -> int:
    """Return the number of rows in a piece, which is stored and read as a unit: a power of two,
    about 4 MiB; the last piece may be smaller.
    """
    row = sum(_row_bytes(field.type) for field in schema)
    rows = max(1, _PIECE_BYTES // row)
    return min(8192, max(16, 1 << int(math.log2(rows))))


def _row_bytes(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _row_bytes(kind.value_type)
    return max(1, int(kind.bit_width) // 8)


def shape_of(kind: pa.DataType) -> tuple[list[int], str]:
    """Return the shape of a column's rows and the name of its dtype.

    Args:
        kind: the column's Arrow type.
    """
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(int(kind.list_size))
        kind = kind.value_type
    return shape, _DTYPES.get(str(kind), str(kind))


class ShardWriter:
    """The writer of one shard, which appears under its name after `finish`.

    Args:
        folder: the harvest's folder.
        shard: the inputs of the shard.
        file_format: ``"arrow"`` or ``"parquet"``.
    """

    def __init__(self, folder: Folder, shard: ShardInput, file_format: FileFormat) -> None:
        self.folder, self.shard, self.format = folder, shard, file_format
        self.name = f"shard-{shard.index:06d}.{file_format}"
        self.rows = self._piece = self._held = 0
        self._file: AtomicFile | None = None
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._pending: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows, and write full pieces.

        Raises:
            WriteError: the system refused to write.
            HarvestError: the columns differ from the earlier ones.
        """
        if self._schema is None:
            self._open(batch.schema)
        elif batch.schema != self._schema:
            raise HarvestError(
                f"the columns changed within a shard: {self._schema} and then {batch.schema}"
            )
        self._pending.append(batch)
        self._held += batch.num_rows
        self.rows += batch.num_rows
        if self._held >= self._piece:
            self._flush(everything=False)

    def _open(self, schema: pa.Schema) -> None:
        self._schema, self._piece = schema, piece_rows(schema)
        with raising_write_errors(self.name):
            self._file = AtomicFile(self.folder, self.name)
            if self.format == "arrow":
                self._writer = pa.ipc.new_file(self._file, schema)
            else:
                self._writer = pq.ParquetWriter(
                    self._file,
                    schema,
                    compression="none",
                    use_dictionary=False,
                    write_statistics=False,
                )

    def _flush(self, everything: bool) -> None:
        """Write the pending rows that fill pieces, or all of them."""
        table = pa.Table.from_batches(self._pending, self._schema)
        rest = 0 if everything else len(table) % self._piece
        end = len(table) - rest
        options = {} if self.format == "arrow" else {"row_group_size": self._piece}
        with raising_write_errors(self.name):
            for start in range(0, end, self._piece):
                piece = table.slice(start, min(self._piece, end - start))
                self._writer.write_table(piece.combine_chunks(), **options)
        # A copy: a slice would hold all of it.
        self._pending = table.slice(end).combine_chunks().to_batches() if rest else []
        self._held = rest

    def finish(self, batch_size: int) -> ShardRecord:
        """Write the shard and its record to their places.

        Args:
            batch_size: the smallest batch size that was used.

        Raises:
            WriteError: the system refused to write.
            HarvestError: there are no rows.
        """
        if self._file is None or self._schema is None:
            raise HarvestError(
                f"shard {self.shard.index} would have no rows: every token was left out"
            )
        self._flush(everything=True)
        with raising_write_errors(self.name):
            self._writer.close()
            checksum = self._file.commit()
        columns: dict[str, Data] = {}
        for column in self._schema:
            if column.name not in ID_COLUMNS:
                shape, dtype = shape_of(column.type)
                columns[column.name] = {"shape": shape, "dtype": dtype}
        shard, after = self.shard, self.shard.after
        record = ShardRecord(
            shard.index,
            self.name,
            self.rows,
            len(shard.lengths),
            len(shard.tokens),
            self._file.size,
            checksum,
            shard.fingerprint(),
            after.documents,
            after.offset,
            after.source,
            columns,
            batch_size,
        )
        self.folder.add(record)
        return record

    def abandon(self) -> None:
        """Remove the unfinished file."""
        if self._file is not None and not self._file.closed:
            self._file.abandon()


def write_shard(
    folder: Folder,
    shard: ShardInput,
    file_format: FileFormat,
    rows: Iterable[pa.RecordBatch],
    used: Callable[[], int],
) -> ShardRecord:
    """Write one shard.

    Args:
        folder: the harvest's folder.
        shard: its inputs.
        file_format: ``"arrow"`` or ``"parquet"``.
        rows: its record batches.
        used: returns, at the end, the batch size that was used.
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
    """A shard, read piece by piece: memory-mapped pages of an Arrow file, row groups of a Parquet
    file.

    Args:
        path: the file.

    Raises:
        HarvestError: it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: Any = None
        self._reader: Any = None
        try:
            if path.suffix == ".arrow":
                self._map = pa.memory_map(str(path))
                self._reader = pa.ipc.open_file(self._map)
                self.pieces = int(self._reader.num_record_batches)
            else:
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
        """Return some columns of one piece, ``[row, ...]``.

        Args:
            index: the index of the piece.
            columns: the names of the columns.
        """
        if self._map is not None:
            piece = self._reader.get_batch(index)
        else:
            piece = self._reader.read_row_group(index, columns=columns)
        return {name: to_numpy(piece.column(name)) for name in columns}

    def table(self, columns: list[str]) -> pa.Table:
        """Return columns of all its rows: an Arrow file's pages, or a copy of a Parquet file."""
        if self._map is None:
            return self._reader.read(columns)
        return self._reader.read_all().select(columns)

    def count(self) -> int:
        """Return the number of rows in the file."""
        if self._map is None:
            return int(self._reader.metadata.num_rows)
        return sum(self._reader.get_batch(i).num_rows for i in range(self.pieces))


def to_numpy(array: pa.Array | pa.ChunkedArray) -> Array:
    """Convert a column to an array ``[row, ...]``, without a copy if its memory layout allows."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(int(array.type.list_size))
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))
    return np.asarray(values.reshape(shape))
