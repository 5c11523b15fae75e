"""`Activations`: what was harvested, read back without holding it in memory."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from bridge.harvest.fingerprint import HarvestError
from bridge.harvest.options import check_number
from bridge.harvest.packing import Array
from bridge.harvest.rows import ID_COLUMNS
from bridge.harvest.shards import Folder, ShardFile
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.names import suggestion

# ----------------------------------------------------------------------------------------------------------------------
# Whether a harvest's folder holds what its manifest says.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class HarvestCheck:
    """What a harvest's checksums say of its files.

    Attributes:
        path: the folder.
        complete: whether the harvest is finished.
        shards, rows, size: of the whole shards (size in bytes).
        problems: what is wrong, in words.
    """

    path: Path | str
    complete: bool
    shards: int
    rows: int
    size: int
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything is there, and as it was written."""
        return self.complete and not self.problems

    def __str__(self) -> str:
        state = "finished" if self.complete else "not finished: the same call of harvest goes on"
        head = f"{self.path}: {self.shards} shards, {self.rows:,} rows, {self.size / 1e6:,.1f} MB, {state}"
        if self.complete and not self.problems:
            head += "; every checksum and row count holds"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


@refuse_wrong_types
def check(path: str | os.PathLike[str]) -> HarvestCheck:
    """Reads every shard of a harvest and compares it with the manifest: size, checksum, rows.

    Args:
        path: the harvest's folder.

    Raises:
        HarvestError: there is no harvest.

    Example:
        >>> import tempfile
        >>> from bridge.harvest import check, harvest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = harvest("embedded", ["Mary and John"], hook_points=["blocks.2.hook_resid_post"], out=folder)
        ...     check(folder).passed
        True
    """
    folder = Folder(path)
    manifest = folder.harvested()
    records, totals = manifest.shards, manifest.totals()
    found = HarvestCheck(folder.path, manifest.complete, len(records), totals["rows"], totals["size"])
    there = folder.sizes()
    for record in records:
        problem = folder.problem(record, there)
        if problem:
            found.problems.append(f"{record.file}: {problem}")
    known = {record.file for record in records}
    if manifest.complete:
        strange = [name for name in sorted(there) if name.startswith("shard-") and name not in known]
        found.problems += [f"{name} is not in the manifest" for name in strange]
    return found


# ----------------------------------------------------------------------------------------------------------------------
# In which order rows are read: pieces of shards at random, and rows at random within what memory holds of them.
# ----------------------------------------------------------------------------------------------------------------------


#: Names of columns and their rows, ``[row, ...]``.
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Share:
    """Whose part of the rows is read, of equal parts.

    Attributes:
        rank, ranks: which process of how many.
        worker, workers: which of its loading workers of how many.
    """

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        for what, part, of in (("rank", self.rank, self.ranks), ("worker", self.worker, self.workers)):
            if not 0 <= part < of:
                raise HarvestError(f"{what} is {part}; it must be from 0 to {of - 1}, for {of} of them")

    def of(self, pieces: Array) -> Array:
        """This part of the pieces: every one of them is in exactly one part.

        Args:
            pieces: ``[piece]``, in the order that all parts agree on.
        """
        return pieces[self.rank * self.workers + self.worker :: self.ranks * self.workers]


def piece_order(count: int, seed: int | None, epoch: int) -> Array:
    """``[piece]``: the order in which pieces are read; as they stand without a seed.

    Args:
        count: how many there are.
        seed: reproduces the order.
        epoch: another order for each.
    """
    if seed is None:
        return np.arange(count)
    return np.random.default_rng([seed, epoch]).permutation(count)


def take(array: Array, rows: Array) -> Array:
    """Some rows of an array, copied.

    Args:
        array: ``[row, ...]``.
        rows: ``[taken]``.
    """
    return np.take(array, rows, axis=0)


# ----------------------------------------------------------------------------------------------------------------------
# Means, norms and covariances, a piece at a time.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """What is known of one column, in float64.

    Attributes:
        rows: how many there are.
        mean: ``[...]``, of each number of a row.
        variance: ``[...]``, likewise, divided by ``rows``.
        norm: the mean of the rows' Euclidean lengths.
        covariance: ``[d, d]`` of the flattened rows, divided by ``rows``; None where it was not asked for.
    """

    rows: int
    mean: Float[Tensor, "*shape"]
    variance: Float[Tensor, "*shape"]
    norm: float
    covariance: Float[Tensor, "d d"] | None


def statistics_of(pieces: Iterable[Array], name: str, covariance: bool) -> Statistics:
    """The statistics of rows that come a piece at a time.

    Pieces are merged as Chan, Golub and LeVeque (1983) merge them, which loses no digits when the mean is far from 0.

    Args:
        pieces: ``[row, ...]`` each.
        name: the column, for the error.
        covariance: of all pairs of numbers, too.

    Raises:
        HarvestError: the column holds something else than finite floating-point numbers, or no rows.
    """
    rows, norms = 0, 0.0
    mean = spread = None
    shape: tuple[int, ...] = ()
    for piece in pieces:
        if not np.issubdtype(piece.dtype, np.floating):
            raise HarvestError(f"{name} holds {piece.dtype}, and statistics are of floating-point numbers")
        shape = piece.shape[1:]
        x = torch.from_numpy(np.array(piece, np.float64).reshape(len(piece), -1))
        if not bool(x.isfinite().all()):
            raise HarvestError(f"{name} holds infinite values (masked scores, say), which have no mean")
        own = x.mean(0)
        centred = x - own
        own_spread = centred.T @ centred if covariance else centred.square().sum(0)
        norms += float(x.norm(dim=1).sum())
        if mean is None or spread is None:
            mean, spread = own, own_spread
        else:
            apart = own - mean
            weight = rows * len(x) / (rows + len(x))
            spread += own_spread + weight * (torch.outer(apart, apart) if covariance else apart.square())
            mean = mean + apart * (len(x) / (rows + len(x)))
        rows += len(x)
    if mean is None or spread is None:
        raise HarvestError(f"{name} has no rows")
    whole = spread / rows
    variance = (whole.diagonal() if covariance else whole).reshape(shape)
    return Statistics(rows, mean.reshape(shape), variance, norms / rows, whole if covariance else None)


#: Names of columns and their rows, ``[batch, ...]``.
Batch = dict[str, Tensor]


class Activations:
    """The rows of a harvest: their number, any of them, or all of them in batches.

    It holds no shard open and no row in memory: only how many rows each shard has.

    Args:
        path: the harvest's folder, or the URL of one in a store (``s3://bucket/acts``).
        partial: read the whole shards of a harvest that is not finished.
        cache: where shards of a store are kept on this machine; None: beside what else is kept of models.

    Attributes:
        manifest: what the harvest is.
        columns: the names of the columns: ids (``document``, ``position``, ``token``, ``sequence``,
            ``context_position``) and activations.

    Raises:
        HarvestError: there is no harvest, or it is not finished, or shards are missing or cut short. One whose checksum
            is another is found when it is first read.

    Example:
        >>> import tempfile
        >>> from bridge.harvest import Activations, harvest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = harvest("embedded", ["Mary and John"], hook_points=["blocks.2.hook_resid_post"], out=folder)
        ...     acts = Activations(folder)
        ...     len(acts), acts[1]["blocks.2.hook_resid_post"].shape
        (4, torch.Size([128]))
    """

    @refuse_wrong_types
    def __init__(
        self, path: str | os.PathLike[str], partial: bool = False, cache: str | os.PathLike[str] | None = None
    ) -> None:
        self.folder = Folder(path, cache)
        manifest = self.folder.harvested()
        if not manifest.complete and not partial:
            raise HarvestError(
                f"the harvest in {os.fspath(path)} is not finished ({len(manifest.shards)} shards are whole): make the "
                "same call of `harvest` again, or read what there is with Activations(path, partial=True)"
            )
        if not manifest.shards:
            raise HarvestError(f"the harvest in {os.fspath(path)} has no whole shard yet")
        there = self.folder.sizes()
        wrong = {r.file: said for r in manifest.shards if (said := self.folder.problem(r, there, checksum=False))}
        if wrong:
            name, said = next(iter(wrong.items()))
            raise HarvestError(
                f"{self.folder.path}/{name}: {said} (as {len(wrong)} of {len(manifest.shards)} shards): the call of "
                "`harvest` that made them makes them again"
            )
        self.manifest = manifest
        self._compared: set[int] = set()  # shards whose checksums were compared
        self.columns = [*ID_COLUMNS, *manifest.shards[0].columns]
        self._ends = np.cumsum([record.rows for record in manifest.shards])
        rows = np.array([record.rows for record in manifest.shards])
        largest = int(rows.argmax())
        with self._open(largest) as shard:
            first = shard.piece(0, self.columns)
        self._shapes = {name: (array.dtype, array.shape[1:]) for name, array in first.items()}
        # All pieces have as many rows as the first one of the largest shard, but for the last one of each shard.
        self._piece = len(first["token"])
        self._piece_ends = np.cumsum(-(-rows // self._piece))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(self._shapes[name][1])}" for name in self.columns if name not in ID_COLUMNS)
        return f"Activations({self.folder.path}: {len(self):,} rows; {shapes})"

    def __len__(self) -> int:
        """How many rows there are."""
        return int(self._ends[-1])

    def _open(self, shard: int) -> ShardFile:
        opened = self.folder.opened(self.manifest.shards[shard], known=shard in self._compared)
        self._compared.add(shard)
        return opened

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        if columns is None:
            return self.columns
        if isinstance(columns, str):
            raise HarvestError(f"columns is the str {columns!r}; it must be a list of names")
        for name in columns:
            if name not in self.columns:
                raise HarvestError(f"there is no column {name!r}.{suggestion(name, self.columns)}")
        return list(columns)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor | Array) -> Batch:
        """Some rows, by number: all columns, ``[row, ...]`` each (without the first axis for a single one).

        Args:
            rows: a number, a slice, or numbers.

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(rows, int | np.integer):
            one = self.read([int(rows)])
            return {name: value[0] for name, value in one.items()}
        if isinstance(rows, slice):
            return self.read(np.arange(*rows.indices(len(self))))
        return self.read(rows)

    def read(
        self, rows: Sequence[int] | Tensor | Array, columns: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:  # fmt: skip
        """Some rows, by number, in the order given.

        Args:
            rows: their numbers; negative ones count from the end.
            columns: which columns; None: all.
            device: where they go.

        Raises:
            IndexError: there is no such row.
            HarvestError: there is no such column.
        """
        names = self._names(columns)
        wanted = np.asarray(rows)
        if wanted.ndim != 1 or (len(wanted) and not np.issubdtype(wanted.dtype, np.integer)):
            raise TypeError(f"rows must be whole numbers in a row, not {wanted.dtype} {list(wanted.shape)}")
        wanted = wanted.astype(np.int64)
        outside = wanted[(wanted >= len(self)) | (wanted < -len(self))]
        if len(outside):
            raise IndexError(f"there is no row {int(outside[0])}: there are {len(self)}")
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        found = {name: np.empty((len(wanted), *self._shapes[name][1]), self._shapes[name][0]) for name in names}
        shards = np.searchsorted(self._ends, wanted, side="right")
        within = wanted - np.where(shards > 0, self._ends[shards - 1], 0)
        for number in np.unique(shards):
            with self._open(int(number)) as shard:
                here = np.flatnonzero(shards == number)
                pieces = within[here] // self._piece
                for piece in np.unique(pieces):
                    places = here[pieces == piece]
                    data = self._piece_of(shard, int(number), int(piece), names)
                    for name in names:
                        found[name][places] = data[name][within[places] % self._piece]
        return _tensors(found, device)

    def _read_piece(self, piece: int, names: list[str]) -> Arrays:
        number = int(np.searchsorted(self._piece_ends, piece, side="right"))
        before = int(self._piece_ends[number - 1]) if number else 0
        with self._open(number) as shard:
            return self._piece_of(shard, number, piece - before, names)

    def _piece_of(self, shard: ShardFile, number: int, piece: int, names: list[str]) -> Arrays:
        """One piece of a shard, which has the rows that its place among the pieces promises."""
        rows = min(self._piece, self.manifest.shards[number].rows - piece * self._piece)
        data = shard.piece(piece, names) if piece < shard.pieces else {}
        for name in names:
            if name not in data or len(data[name]) != rows:
                got = len(data[name]) if name in data else "none"
                raise HarvestError(
                    f"piece {piece} of {shard.path} should have {rows} rows and has {got}: it was not written by "
                    "`harvest`, or is damaged (bridge.harvest.check says)"
                )
        return data

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        memory: int = 2**29,
        columns: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
        drop_last: bool = False,
        share: Share = Share(),
    ) -> Iterator[Batch]:
        """All rows in batches.

        Shuffled, pieces of all shards (about 4 MiB each) are read in a random order into a pool of `memory` bytes, and
        batches are drawn from the pool at random. The same seed, epoch and memory give the same batches.

        Args:
            batch_size: rows in a batch.
            shuffle: at random.
            seed, epoch: reproduce the order; another epoch is another order.
            memory: how many bytes of rows are held for shuffling.
            columns: which columns; None: all.
            device: where the batches go.
            drop_last: leave out the last batch where it is smaller.
            share: read only a part of the rows; the parts of all ranks and workers are all rows, each once.

        Raises:
            HarvestError: there is no such column, or too little memory for one piece and one batch.
        """
        if type(batch_size) is not int or batch_size < 1:
            raise HarvestError(f"batch_size is {batch_size!r}; it must be a whole number from 1 on")
        names = self._names(columns)
        if shuffle:
            self._pool_rows(names, memory, batch_size)
        return self._batches(names, batch_size, shuffle, seed, epoch, memory, device, drop_last, share)

    def _pool_rows(self, names: list[str], memory: int, batch_size: int) -> int:
        row = sum(int(np.prod(shape, dtype=np.int64)) * kind.itemsize for kind, shape in map(self._shapes.get, names))  # type: ignore[misc]
        rows = memory // max(1, row)
        if rows < self._piece + batch_size:
            least = (self._piece + batch_size) * row
            raise HarvestError(
                f"memory is {memory} bytes; shuffling batches of {batch_size} rows needs at least {least} "
                "(one piece and one batch)"
            )
        return int(min(rows, len(self) + batch_size))

    def _batches(
        self, names: list[str], size: int, shuffle: bool, seed: int, epoch: int, memory: int,
        device: torch.device | str, drop_last: bool, share: Share,
    ) -> Iterator[Batch]:  # fmt: skip
        pieces = share.of(piece_order(int(self._piece_ends[-1]), seed if shuffle else None, epoch))
        made = (
            self._shuffled(names, size, seed, epoch, memory, pieces, share)
            if shuffle
            else self._plain(names, size, pieces)
        )
        for arrays in made:
            if drop_last and len(next(iter(arrays.values()))) < size:
                return
            yield _tensors(arrays, device)

    def _plain(self, names: list[str], size: int, pieces: Any) -> Iterator[Arrays]:
        held: list[Arrays] = []
        count = 0
        for piece in pieces:
            data = self._read_piece(int(piece), names)
            held.append(data)
            count += len(data[names[0]])
            if count < size:
                continue
            joined = {name: np.concatenate([part[name] for part in held]) for name in names}
            whole = count // size * size
            for start in range(0, whole, size):
                yield {name: joined[name][start : start + size].copy() for name in names}
            held = [{name: joined[name][whole:].copy() for name in names}]
            count -= whole
        if count:
            yield {name: np.concatenate([part[name] for part in held]) for name in names}

    def _shuffled(
        self, names: list[str], size: int, seed: int, epoch: int, memory: int, pieces: Any, share: Share
    ) -> Iterator[Arrays]:
        """Batches drawn at random from rows in memory, which are filled up where no other piece has room there.

        Rows that fill no batch stay, until nothing comes after them.
        """
        rng = np.random.default_rng([seed, epoch, share.rank, share.worker])
        room, held = self._pool_rows(names, memory, size), 0
        pool = {name: np.empty((room, *shape), kind) for name in names for kind, shape in (self._shapes[name],)}
        for piece in (*pieces, None):
            if piece is None or held + self._piece > room:
                order = rng.permutation(held)
                whole = held if piece is None else held // size * size
                for start in range(0, whole, size):
                    chosen = order[start : start + size]
                    yield {name: take(rows, chosen) for name, rows in pool.items()}
                rest = np.sort(order[whole:])
                for rows in pool.values():
                    rows[: len(rest)] = rows[rest]
                held = len(rest)
            if piece is not None:
                read = self._read_piece(int(piece), names)
                count = len(read[names[0]])
                for name, rows in pool.items():
                    rows[held : held + count] = read[name]
                held += count

    def torch(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, memory: int = 2**29,
        columns: Sequence[str] | None = None, drop_last: bool = False, rank: int = 0, ranks: int = 1,
    ) -> ActivationsDataset:  # fmt: skip
        """A data set for ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=...)``.

        Args:
            batch_size, shuffle, seed, columns, drop_last: as for `batches`.
            memory: how many bytes of rows each loading worker holds for shuffling.
            rank, ranks: which process of how many reads; each reads its part.
        """
        self._names(columns)
        return ActivationsDataset(
            self, batch_size, shuffle, seed, memory, columns, drop_last, Share(rank=rank, ranks=ranks)
        )

    def to_datasets(self, columns: Sequence[str] | None = None) -> Any:
        """All rows as a `datasets.Dataset` of Hugging Face: the shards' own pages, where they are Arrow files.

        Args:
            columns: which columns; None: all.

        Raises:
            HarvestError: there is no such column, or `datasets` is not installed.

        Example:
            >>> import tempfile
            >>> from bridge.harvest import Activations, harvest
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = harvest("embedded", ["Mary and John"], hook_points=["blocks.2.hook_resid_post"], out=folder)
            ...     len(Activations(folder).to_datasets())
            4
        """
        names = self._names(columns)
        if importlib.util.find_spec("datasets") is None:
            raise HarvestError("to_datasets needs Hugging Face's datasets: pip install datasets")
        tables = [self._open(number).table(names) for number in range(len(self.manifest.shards))]
        return importlib.import_module("datasets").Dataset(pa.concat_tables(tables))

    def to_webdataset(
        self, out: str | os.PathLike[str], columns: Sequence[str] | None = None, rows_per_file: int = 2**14
    ) -> list[str]:
        """Writes all rows as tar files that webdataset reads, and what reads its form: loaders of many nodes.

        A row is ``NUMBER.ids.json`` (document, position, token, ...) and ``NUMBER.COLUMN.npy`` for each activation.

        Args:
            out: a folder, or the URL of one in a store.
            columns: which columns; None: all.
            rows_per_file: how many rows a file holds.

        Returns:
            The files' names, in order.

        Raises:
            HarvestError: there is no such column.
            WriteError: the system refused to write.

        Example:
            >>> import tempfile
            >>> from bridge.harvest import Activations, harvest
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = harvest("embedded", ["Mary and John"], hook_points=["blocks.2.hook_resid_post"], out=folder)
            ...     Activations(folder).to_webdataset(folder + "/tars")
            ['rows-000000.tar']
        """
        check_number("rows_per_file", rows_per_file, 1)
        names, folder = self._names(columns), Folder(out)
        made: list[str] = []
        for start in range(0, len(self), rows_per_file):
            made.append(f"rows-{len(made):06d}.tar")
            with folder.whole(made[-1]) as file, tarfile.open(fileobj=cast(BinaryIO, file), mode="w|") as tar:
                for row in range(start, min(start + rows_per_file, len(self)), self._piece):
                    end = min(row + self._piece, start + rows_per_file, len(self))
                    held = self.read(np.arange(row, end), names)
                    for number in range(end - row):
                        _add_row(tar, row + number, {name: values[number] for name, values in held.items()})
        return made

    def statistics(self, column: str, covariance: bool = False) -> Statistics:
        """Mean, variance, norm and covariance of a column, a piece at a time.

        Args:
            column: its name.
            covariance: of all pairs of numbers, too (``d * d`` numbers in float64).

        Raises:
            HarvestError: there is no such column, or it holds no finite floating-point numbers.
        """
        (name,) = self._names([column])
        pieces = (self._read_piece(piece, [name])[name] for piece in range(int(self._piece_ends[-1])))
        return statistics_of(pieces, name, covariance)


class ActivationsDataset(IterableDataset[Batch]):
    """Batches of a harvest for torch's `DataLoader`: every loading worker of every rank reads its own part.

    See `Activations.torch` for the arguments.
    """

    def __init__(
        self, activations: Activations, batch_size: int, shuffle: bool, seed: int, memory: int,
        columns: Sequence[str] | None, drop_last: bool, share: Share,
    ) -> None:  # fmt: skip
        self.activations, self.share, self.epoch = activations, share, 0
        self._arguments: dict[str, Any] = {
            "batch_size": batch_size, "shuffle": shuffle, "seed": seed, "memory": memory, "columns": columns,
            "drop_last": drop_last,
        }  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass.

        Args:
            epoch: its number.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        share = Share(self.share.rank, self.share.ranks, worker, workers)
        return self.activations.batches(**self._arguments, epoch=self.epoch, share=share)


def _add_row(tar: tarfile.TarFile, number: int, row: dict[str, Tensor]) -> None:
    """Puts a row into a tar file, as webdataset has it: what has one name before the first dot is one sample."""
    parts: dict[str, bytes] = {}
    if ids := {name: int(row.pop(name)) for name in ID_COLUMNS if name in row}:
        parts["ids.json"] = json.dumps(ids).encode()
    for name, values in row.items():
        data = io.BytesIO()
        np.save(data, values.numpy())
        parts[f"{name}.npy"] = data.getvalue()
    for name, content in parts.items():
        entry = tarfile.TarInfo(f"{number:012d}.{name}")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))


def _tensors(arrays: Arrays, device: torch.device | str) -> Batch:
    made = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return made if str(device) == "cpu" else {name: value.to(device) for name, value in made.items()}
