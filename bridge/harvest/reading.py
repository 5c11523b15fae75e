"""`Activations`: a harvest, read without holding it in memory."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from bridge.arguments import refuse_wrong_types
from bridge.harvest.fingerprint import HarvestError
from bridge.harvest.options import check_number
from bridge.harvest.packing import Array
from bridge.harvest.rows import ID_COLUMNS
from bridge.harvest.shards import Folder, ShardFile
from bridge.hooks.names import suggestion

# --------------------------------------------------------------------------------------------------
# The check of a harvest's folder against its manifest.
# --------------------------------------------------------------------------------------------------


@dataclass
class HarvestCheck:
    """The result of comparing a harvest's files with its checksums.

    Attributes:
        path: the folder.
        complete: whether the harvest is finished.
        shards, rows, size: the number of complete shards, their rows, and their size in bytes.
        problems: descriptions of the problems.
    """

    path: Path | str
    complete: bool
    shards: int
    rows: int
    size: int
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the harvest is complete and undamaged."""
        return self.complete and not self.problems

    def __str__(self) -> str:
        state = "finished" if self.complete else "not finished: the same call of harvest goes on"
        if self.passed:
            state += "; every checksum and row count holds"
        head = (
            f"{self.path}: {self.shards} shards, {self.rows:,} rows, {self.size / 1e6:,.1f} MB,"
            f" {state}"
        )
        return "\n  ".join([head, *self.problems])


@refuse_wrong_types
def check(path: str | os.PathLike[str]) -> HarvestCheck:
    """Read every shard of a harvest and compare it with the manifest: size, checksum, rows.

    Args:
        path: the harvest's folder.

    Raises:
        HarvestError: there is no harvest.

    Example:
        >>> import tempfile
        >>> from bridge.harvest import check, harvest
        >>> points = ["blocks.2.hook_resid_post"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = harvest("embedded", ["Mary and John"], hook_points=points, out=folder)
        ...     check(folder).passed
        True
    """
    folder = Folder(path)
    manifest = folder.harvested()
    records, totals = manifest.shards, manifest.totals()
    problems = []
    for file, problem in folder.problems(records, checksums=True).items():
        problems.append(f"{file}: {problem}")
    if manifest.complete:
        known = {record.file for record in records}
        for name in sorted(folder.sizes()):
            if name.startswith("shard-") and name not in known:
                problems.append(f"{name} is not in the manifest")
    rows, size = totals["rows"], totals["size"]
    return HarvestCheck(folder.path, manifest.complete, len(records), rows, size, problems)


# --------------------------------------------------------------------------------------------------
# The order of rows: pieces of shards at random, and rows at random within the pieces in memory.
# --------------------------------------------------------------------------------------------------


#: Names of columns and their rows, ``[row, ...]``.
Arrays = dict[str, Array]
#: Names of columns; None: all.
Columns = Sequence[str] | None
#: Numbers of rows.
RowNumbers = Sequence[int] | Tensor | Array
Device = torch.device | str


@dataclass(frozen=True)
class Share:
    """The part of the data that a process and a loading worker read.

    Attributes:
        rank, ranks: the number of the process, and the number of processes.
        worker, workers: the number of its loading worker, and the number of workers.
    """

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        for name, number in (("rank", self.rank), ("worker", self.worker)):
            total = getattr(self, f"{name}s")
            if not 0 <= number < total:
                raise HarvestError(
                    f"{name} is {number}; it must be from 0 to {total - 1}, for {total} of them"
                )

    def of(self, pieces: Array) -> Array:
        """Return this part of the pieces; every piece is in exactly one part.

        Args:
            pieces: ``[piece]``, in the same order for all parts.
        """
        first = self.rank * self.workers + self.worker
        return pieces[first :: self.ranks * self.workers]


def piece_order(count: int, seed: int | None, epoch: int) -> Array:
    """Return ``[piece]``, the order in which pieces are read; without a seed, their order in the
    file.

    Args:
        count: the number of pieces.
        seed: reproduces the order.
        epoch: the epoch; each has a different order.
    """
    if seed is None:
        return np.arange(count)
    return np.random.default_rng([seed, epoch]).permutation(count)


def take(array: Array, rows: Array) -> Array:
    """Return some rows of an array, copied.

    Args:
        array: ``[row, ...]``.
        rows: ``[taken]``.
    """
    return np.take(array, rows, axis=0)


def _draw(pool: Arrays, order: Array, size: int) -> Iterator[Arrays]:
    """Yield copies of the pool's rows in batches, in an order ``[row]``."""
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield {name: take(values, rows) for name, values in pool.items()}


def _join(parts: Sequence[Arrays], names: Sequence[str]) -> Arrays:
    """Concatenate the rows of several parts."""
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _copy(arrays: Arrays, start: int, end: int) -> Arrays:
    """Return a copy of some consecutive rows."""
    return {name: values[start:end].copy() for name, values in arrays.items()}


def _batches(arrays: Iterator[Arrays], least: int, device: Device) -> Iterator[Batch]:
    """Yield batches as tensors; drop the last one if it has fewer rows than `least`."""
    for batch in arrays:
        if len(next(iter(batch.values()))) < least:
            return
        yield _tensors(batch, device)


# --------------------------------------------------------------------------------------------------
# Means, norms and covariances, a piece at a time.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """The count, mean, variance and covariance of one column of a harvest, in float64.

    Attributes:
        rows: the number of rows.
        mean: ``[...]``, the mean of each entry of a row.
        variance: ``[...]``, the variance of each entry, divided by ``rows``.
        norm: the mean of the rows' Euclidean lengths.
        covariance: ``[d, d]``, of the flattened rows, divided by ``rows``; None if it was not
            requested.
    """

    rows: int
    mean: Float[Tensor, "*shape"]
    variance: Float[Tensor, "*shape"]
    norm: float
    covariance: Float[Tensor, "d d"] | None


def statistics_of(pieces: Iterable[Array], name: str, covariance: bool) -> Statistics:
    """Return the statistics of rows that come a piece at a time.

    Args:
        pieces: the pieces, each ``[row, ...]``.
        name: the column, for errors.
        covariance: also compute the covariance.

    Raises:
        HarvestError: the column contains anything but finite floating-point numbers, or no rows.
    """
    moments = _Moments(covariance)
    for piece in pieces:
        if not np.issubdtype(piece.dtype, np.floating):
            raise HarvestError(
                f"{name} holds {piece.dtype}, and statistics are of floating-point numbers"
            )
        rows = torch.from_numpy(np.array(piece, np.float64))
        if not bool(rows.isfinite().all()):
            raise HarvestError(
                f"{name} holds infinite values (masked scores, say), which have no mean"
            )
        moments.add(rows.reshape(len(piece), -1))
    count = moments.rows
    if not count:
        raise HarvestError(f"{name} has no rows")
    shape = rows.shape[1:]
    mean, norm = moments.mean.reshape(shape), moments.norms / count
    spread = moments.spread / count
    if covariance:
        return Statistics(count, mean, spread.diagonal().reshape(shape), norm, spread)
    return Statistics(count, mean, spread.reshape(shape), norm, None)


class _Moments:
    """Sums over rows, merged by the method of Chan, Golub and LeVeque (1983), which does not lose
    precision if the mean is far from 0.

    Attributes:
        spread: the sums of squared deviations; for a covariance, the sums of products for all pairs
            of entries.
    """

    def __init__(self, covariance: bool) -> None:
        self.rows, self.norms = 0, 0.0
        self.mean = self.spread = torch.zeros((), device="cpu")
        self._covariance = covariance

    def add(self, x: Tensor) -> None:
        """Add rows ``[row, d]``."""
        mean, new = x.mean(0), len(x)
        centred = x - mean
        spread = centred.T @ centred if self._covariance else centred.square().sum(0)
        if self.rows:
            distance = mean - self.mean
            total = self.rows + new
            squares = torch.outer(distance, distance) if self._covariance else distance.square()
            between = self.rows * new / total * squares
            spread = self.spread + (spread + between)
            mean = self.mean + distance * (new / total)
        self.mean, self.spread = mean, spread
        self.norms += float(x.norm(dim=1).sum())
        self.rows += new


#: Names of columns and their rows, ``[batch, ...]``.
Batch = dict[str, Tensor]


class Activations:
    """The rows of a harvest: their number, any row by index, or all rows in batches. It keeps no
    shard open and no row in memory, only the number of rows of each shard.

    Args:
        path: the harvest's folder, or the URL of one in a store (``s3://bucket/acts``).
        partial: read the complete shards of an unfinished harvest.
        cache: the folder on this machine in which shards of a remote store are cached; None: a
            folder in this library's cache.

    Attributes:
        manifest: the description of the harvest.
        columns: the names of the columns: ids (``document``, ``position``, ``token``, ``sequence``,
            ``context_position``) and activations.

    Raises:
        HarvestError: there is no harvest, it is not finished, or shards are missing or truncated.
            (Checksums are compared when a shard is first read.)

    Example:
        >>> import tempfile
        >>> from bridge.harvest import Activations, harvest
        >>> points = ["blocks.2.hook_resid_post"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = harvest("embedded", ["Mary and John"], hook_points=points, out=folder)
        ...     acts = Activations(folder)
        ...     len(acts), acts[1]["blocks.2.hook_resid_post"].shape
        (4, torch.Size([128]))
    """

    @refuse_wrong_types
    def __init__(
        self,
        path: str | os.PathLike[str],
        partial: bool = False,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.folder = Folder(path, cache)
        self.manifest = manifest = self.folder.harvested()
        if not manifest.complete and not partial:
            raise HarvestError(
                f"the harvest in {os.fspath(path)} is not finished ({len(manifest.shards)} shards"
                " are whole): make the same call of `harvest` again, or read what there is with"
                " Activations(path, partial=True)"
            )
        if not manifest.shards:
            raise HarvestError(f"the harvest in {os.fspath(path)} has no whole shard yet")
        self._check_sizes()
        self._compared: set[int] = set()  # shards whose checksums were compared
        self.columns = [*ID_COLUMNS, *manifest.shards[0].columns]
        rows = np.array([record.rows for record in manifest.shards])
        self._ends = np.cumsum(rows)
        with self._open(int(rows.argmax())) as shard:
            first = shard.piece(0, self.columns)
        self._shapes = {name: (values.dtype, values.shape[1:]) for name, values in first.items()}
        # All pieces have as many rows as the first one of the largest shard, but for the last piece
        # of each shard.
        self._piece = len(first["token"])
        self._piece_ends = np.cumsum(-(-rows // self._piece))

    def _check_sizes(self) -> None:
        """Check that every shard exists and has the size of its record."""
        folder, records = self.folder, self.manifest.shards
        problems = folder.problems(records, checksums=False)
        if problems:
            file, problem = next(iter(problems.items()))
            raise HarvestError(
                f"{folder.path}/{file}: {problem} (as {len(problems)} of {len(records)}"
                " shards): the call of `harvest` that made them makes them again"
            )

    def __repr__(self) -> str:
        shapes = []
        for name in self.columns:
            if name not in ID_COLUMNS:
                _, shape = self._shapes[name]
                shapes.append(f"{name} {list(shape)}")
        return f"Activations({self.folder.path}: {len(self):,} rows; {', '.join(shapes)})"

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def _open(self, shard: int) -> ShardFile:
        """Open a shard; its checksum is compared the first time."""
        record = self.manifest.shards[shard]
        opened = self.folder.opened(record, known=shard in self._compared)
        self._compared.add(shard)
        return opened

    def _names(self, columns: Columns) -> list[str]:
        if columns is None:
            return self.columns
        if isinstance(columns, str):
            raise HarvestError(f"columns is the str {columns!r}; it must be a list of names")
        for name in columns:
            if name not in self.columns:
                raise HarvestError(f"there is no column {name!r}.{suggestion(name, self.columns)}")
        return list(columns)

    def __getitem__(self, rows: int | slice | RowNumbers) -> Batch:
        """Return rows by number: all columns, each ``[row, ...]`` (without the first axis for a
        single row).

        Args:
            rows: a number, a slice, or numbers.

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(rows, int | np.integer):
            batch = self.read([int(rows)])
            return {name: values[0] for name, values in batch.items()}
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        return self.read(rows)

    def read(self, rows: RowNumbers, columns: Columns = None, device: Device = "cpu") -> Batch:
        """Return rows by number, in the given order.

        Args:
            rows: their numbers; negative ones count from the end.
            columns: the columns; None: all.
            device: the device of the result.

        Raises:
            IndexError: a number out of range.
            HarvestError: an unknown column.
        """
        names = self._names(columns)
        numbers = self._row_numbers(rows)
        arrays = self._empty(names, len(numbers))
        shards = np.searchsorted(self._ends, numbers, side="right")
        starts = np.concatenate([[0], self._ends])
        pieces, places = np.divmod(numbers - starts[shards], self._piece)
        for index in map(int, np.unique(shards)):
            with self._open(index) as shard:
                in_shard = np.flatnonzero(shards == index)
                for piece in np.unique(pieces[in_shard]):
                    targets = in_shard[pieces[in_shard] == piece]
                    piece_arrays = self._piece_of(shard, index, int(piece), names)
                    for name, values in piece_arrays.items():
                        arrays[name][targets] = values[places[targets]]
        return _tensors(arrays, device)

    def _row_numbers(self, rows: RowNumbers) -> Array:
        """Return non-negative row numbers, checked."""
        numbers = np.asarray(rows)
        are_whole = np.issubdtype(numbers.dtype, np.integer)
        if numbers.ndim != 1 or (len(numbers) and not are_whole):
            raise TypeError(
                f"rows must be whole numbers in a row, not {numbers.dtype} {list(numbers.shape)}"
            )
        total = len(self)
        numbers = numbers.astype(np.int64)
        outside = numbers[(numbers >= total) | (numbers < -total)]
        if len(outside):
            raise IndexError(f"there is no row {int(outside[0])}: there are {total}")
        return np.where(numbers < 0, numbers + total, numbers)

    def _empty(self, names: list[str], rows: int) -> Arrays:
        """Return uninitialised columns with this number of rows."""
        arrays = {}
        for name in names:
            dtype, shape = self._shapes[name]
            arrays[name] = np.empty((rows, *shape), dtype)
        return arrays

    def _read_piece(self, piece: int, names: list[str]) -> Arrays:
        """Return a piece by its number among the pieces of all shards."""
        number = int(np.searchsorted(self._piece_ends, piece, side="right"))
        before = int(self._piece_ends[number - 1]) if number else 0
        with self._open(number) as shard:
            return self._piece_of(shard, number, piece - before, names)

    def _piece_of(self, shard: ShardFile, number: int, piece: int, names: list[str]) -> Arrays:
        """Return a piece of a shard; check its number of rows."""
        rows_of_shard = self.manifest.shards[number].rows
        expected = min(self._piece, rows_of_shard - piece * self._piece)
        arrays = shard.piece(piece, names) if piece < shard.pieces else {}
        for name in names:
            rows = len(arrays[name]) if name in arrays else "none"
            if rows != expected:
                raise HarvestError(
                    f"piece {piece} of {shard.path} should have {expected} rows and has {rows}: it"
                    " was not written by `harvest`, or is damaged (bridge.harvest.check says)"
                )
        return arrays

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        memory: int = 2**29,
        columns: Columns = None,
        device: Device = "cpu",
        drop_last: bool = False,
        share: Share = Share(),
    ) -> Iterator[Batch]:
        """Yield all rows in batches.

        For shuffling, pieces of all shards (about 4 MiB each) are read in random order into a pool
        of `memory` bytes, and batches are drawn from the pool at random. The same seed, epoch and
        memory give the same batches.

        Args:
            batch_size: rows in a batch.
            shuffle: yield the rows in random order.
            seed, epoch: determine the order; each epoch has a different one.
            memory: the size of the shuffling pool, in bytes.
            columns: the columns; None: all.
            device: the device of the batches.
            drop_last: omit the last batch if it is smaller.
            share: read only this part of the rows; together, the parts of all ranks and workers
                contain every row once.

        Raises:
            HarvestError: there is no such column, or too little memory for one piece and one batch.
        """
        if type(batch_size) is not int or batch_size < 1:
            raise HarvestError(f"batch_size is {batch_size!r}; it must be a whole number from 1 on")
        names = self._names(columns)
        order = piece_order(int(self._piece_ends[-1]), seed if shuffle else None, epoch)
        pieces = share.of(order)
        if shuffle:
            room = self._pool_rows(names, memory, batch_size)
            rng = np.random.default_rng([seed, epoch, share.rank, share.worker])
            arrays = self._shuffled(names, batch_size, pieces, room, rng)
        else:
            arrays = self._plain(names, batch_size, pieces)
        return _batches(arrays, batch_size if drop_last else 0, device)

    def _pool_rows(self, names: list[str], memory: int, batch_size: int) -> int:
        """Return the number of rows in a pool of this many bytes."""
        row = sum(values.nbytes for values in self._empty(names, 1).values())
        rows = memory // max(1, row)
        least = self._piece + batch_size
        if rows < least:
            raise HarvestError(
                f"memory is {memory} bytes; shuffling batches of {batch_size} rows needs at least"
                f" {least * row} (one piece and one batch)"
            )
        return min(rows, len(self) + batch_size)

    def _plain(self, names: list[str], size: int, pieces: Array) -> Iterator[Arrays]:
        """Yield batches in the order of the pieces."""
        held: list[Arrays] = []
        count = 0
        for piece in pieces:
            held.append(self._read_piece(int(piece), names))
            count += len(held[-1][names[0]])
            if count < size:
                continue
            joined = _join(held, names)
            full = count // size * size
            for start in range(0, full, size):
                yield _copy(joined, start, start + size)
            held = [_copy(joined, full, count)]
            count -= full
        if count:
            yield _join(held, names)

    def _shuffled(
        self, names: list[str], size: int, pieces: Array, room: int, rng: np.random.Generator
    ) -> Iterator[Arrays]:
        """Yield random batches from a pool of rows, emptied when the next piece does not fit.

        Rows that do not fill a batch are left in the pool and yielded at its end.
        """
        pool, held = self._empty(names, room), 0
        for piece in pieces:
            if held + self._piece > room:
                order = rng.permutation(held)
                full = held // size * size
                yield from _draw(pool, order[:full], size)
                rest = np.sort(order[full:])
                held = len(rest)
                for rows in pool.values():
                    rows[:held] = rows[rest]
            arrays = self._read_piece(int(piece), names)
            count = len(arrays[names[0]])
            for name, rows in pool.items():
                rows[held : held + count] = arrays[name]
            held += count
        yield from _draw(pool, rng.permutation(held), size)

    def torch(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        memory: int = 2**29,
        columns: Columns = None,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> ActivationsDataset:
        """Return a data set for ``torch.utils.data.DataLoader(dataset, batch_size=None,
        num_workers=...)``.

        Args:
            batch_size, shuffle, seed, columns, drop_last: as for `batches`.
            memory: the size of each loading worker's shuffling pool, in bytes.
            rank, ranks: the number of this process, and the number of processes; each reads its
                part.
        """
        self._names(columns)
        share = Share(rank, ranks)
        return ActivationsDataset(
            self, batch_size, shuffle, seed, memory, columns, drop_last, share
        )

    def to_datasets(self, columns: Columns = None) -> Any:
        """Return all rows as a Hugging Face `datasets.Dataset`; Arrow shards are memory-mapped, not
        copied.

        Args:
            columns: the columns; None: all.

        Raises:
            HarvestError: there is no such column, or `datasets` is not installed.

        Example:
            >>> import tempfile
            >>> from bridge.harvest import Activations, harvest
            >>> points = ["blocks.2.hook_resid_post"]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = harvest("embedded", ["Mary and John"], hook_points=points, out=folder)
            ...     len(Activations(folder).to_datasets())
            4
        """
        names = self._names(columns)
        if importlib.util.find_spec("datasets") is None:
            raise HarvestError("to_datasets needs Hugging Face's datasets: pip install datasets")
        shards = range(len(self.manifest.shards))
        table = pa.concat_tables(self._open(number).table(names) for number in shards)
        return importlib.import_module("datasets").Dataset(table)

    def to_webdataset(
        self,
        out: str | os.PathLike[str],
        columns: Columns = None,
        rows_per_file: int = 2**14,
    ) -> list[str]:
        """Write all rows as tar files for webdataset and compatible loaders.

        A row is ``NUMBER.ids.json`` (document, position, token, ...) and ``NUMBER.COLUMN.npy`` for
        each activation.

        Args:
            out: a folder, or the URL of one in a store.
            columns: the columns; None: all.
            rows_per_file: the number of rows in a file.

        Returns:
            The files' names, in order.

        Raises:
            HarvestError: there is no such column.
            WriteError: the system refused to write.

        Example:
            >>> import tempfile
            >>> from bridge.harvest import Activations, harvest
            >>> points = ["blocks.2.hook_resid_post"]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = harvest("embedded", ["Mary and John"], hook_points=points, out=folder)
            ...     Activations(folder).to_webdataset(folder + "/tars")
            ['rows-000000.tar']
        """
        check_number("rows_per_file", rows_per_file, 1)
        names, folder = self._names(columns), Folder(out)
        files: list[str] = []
        for start in range(0, len(self), rows_per_file):
            end = min(start + rows_per_file, len(self))
            files.append(f"rows-{len(files):06d}.tar")
            with (
                folder.whole(files[-1]) as file,
                tarfile.open(fileobj=cast(BinaryIO, file), mode="w|") as tar,
            ):
                for first in range(start, end, self._piece):
                    numbers = range(first, min(first + self._piece, end))
                    batch = self.read(numbers, names)
                    for place, number in enumerate(numbers):
                        row = {name: values[place] for name, values in batch.items()}
                        _add_row(tar, number, row)
        return files

    def statistics(self, column: str, covariance: bool = False) -> Statistics:
        """Return mean, variance, norm and covariance of a column, reading one piece at a time.

        Args:
            column: its name.
            covariance: also compute the covariance (``d * d`` numbers in float64).

        Raises:
            HarvestError: an unknown column, or no finite floating-point numbers in it.
        """
        names = self._names([column])
        numbers = range(int(self._piece_ends[-1]))
        pieces = (self._read_piece(number, names)[column] for number in numbers)
        return statistics_of(pieces, column, covariance)


class ActivationsDataset(IterableDataset[Batch]):
    """Batches of a harvest for torch's `DataLoader`: every loading worker of every rank reads its
    own part.

    See `Activations.torch` for the arguments.
    """

    def __init__(
        self,
        activations: Activations,
        batch_size: int,
        shuffle: bool,
        seed: int,
        memory: int,
        columns: Columns,
        drop_last: bool,
        share: Share,
    ) -> None:
        self.activations, self.share, self.epoch = activations, share, 0
        self._arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "memory": memory,
            "columns": columns,
            "drop_last": drop_last,
        }

    def set_epoch(self, epoch: int) -> None:
        """Set the order of the next pass.

        Args:
            epoch: its number.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = 0, 1
        info = get_worker_info()
        if info is not None:
            worker, workers = info.id, info.num_workers
        share = replace(self.share, worker=worker, workers=workers)
        return self.activations.batches(**self._arguments, epoch=self.epoch, share=share)


def _add_row(tar: tarfile.TarFile, number: int, row: dict[str, Tensor]) -> None:
    """Write a row into a tar file. In webdataset, files with the same name up to the first dot form
    one sample.
    """
    contents: dict[str, bytes] = {}
    if ids := {name: int(row[name]) for name in ID_COLUMNS if name in row}:
        contents["ids.json"] = json.dumps(ids).encode()
    for name, values in row.items():
        if name not in ids:
            data = io.BytesIO()
            np.save(data, values.numpy())
            contents[f"{name}.npy"] = data.getvalue()
    for name, content in contents.items():
        entry = tarfile.TarInfo(f"{number:012d}.{name}")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))


def _tensors(arrays: Arrays, device: Device) -> Batch:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
