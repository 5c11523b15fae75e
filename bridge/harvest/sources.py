"""Where documents come from: lists, iterators, files, Hugging Face data sets, Ray data sets."""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow.parquet as pq
from torch import Tensor

from bridge.harvest.errors import HarvestError

#: One document: a text, or token ids.
Document = str | np.ndarray[Any, np.dtype[np.int64]]


class Source(Protocol):
    """Documents in a fixed order.

    Attributes:
        total: how many there are, where that can be had without reading them.
        identity: what tells it from another source without reading it, where there is such a thing.
        description: what it is, for the manifest.
    """

    total: int | None
    identity: Any
    description: str

    def documents(self) -> Iterator[Document]:
        """The documents."""


@dataclass(frozen=True)
class Files:
    """Files with documents: ``.txt`` (a document on each line), ``.jsonl`` (an object on each line), ``.parquet``.

    ``.txt`` and ``.jsonl`` may end in ``.gz``. Empty lines are no documents.

    Args:
        patterns: paths or globs, read in sorted order within each glob.

    Raises:
        FileNotFoundError: a pattern that matches nothing.
        HarvestError: a file of another kind.

    Example:
        >>> import pathlib, tempfile
        >>> from bridge.harvest import Files
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "a.txt").write_text("Mary and John")
        ...     len(Files(folder + "/*.txt").paths)
        1
    """

    paths: tuple[str, ...]

    def __init__(self, *patterns: str | os.PathLike[str]) -> None:
        found: list[str] = []
        for pattern in [os.fspath(given) for given in patterns]:
            matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
            matches = [path for path in matches if os.path.isfile(path)]
            if not matches:
                raise FileNotFoundError(f"no file matches {pattern!r}")
            found += matches
        if not found:
            raise HarvestError("Files() was given no path")
        for path in found:
            if _kind(path) is None:
                raise HarvestError(f"{path} is no file that can be read: .txt, .jsonl (each also .gz) and .parquet can")
        object.__setattr__(self, "paths", tuple(found))


def _kind(path: str) -> str | None:
    name = path.removesuffix(".gz")
    for suffix, kind in ((".txt", "text"), (".jsonl", "json"), (".ndjson", "json")):
        if name.endswith(suffix):
            return kind
    return "parquet" if path.endswith(".parquet") else None


class _Base:
    total: int | None = None
    identity: Any = None
    description = ""


class ItemsSource(_Base):
    """A list of texts or of token ids, a tensor of tokens ``[document, pos]``, or an iterator, which reading uses up.

    Args:
        items: the documents.
        total: how many there are, where that is known.
    """

    def __init__(self, items: Iterable[Any], total: int | None) -> None:
        self.items, self.total = items, total
        self.description = "an iterator" if total is None else f"{total} documents in memory"

    def documents(self) -> Iterator[Document]:
        """See `Source`."""
        for number, item in enumerate(self.items):
            yield document(item, number, None)


class FilesSource(_Base):
    """Files (see `Files`)."""

    def __init__(self, files: Files, column: str) -> None:
        self.files, self.column = files, column
        self.identity = [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in files.paths]
        self.description = ", ".join(files.paths[:3]) + (f" and {len(files.paths) - 3} more" * (len(files.paths) > 3))

    def documents(self) -> Iterator[Document]:
        """See `Source`."""
        number = 0
        for path in self.files.paths:
            for item in self._items(path):
                yield document(item, number, path)
                number += 1

    def _items(self, path: str) -> Iterator[Any]:
        kind = _kind(path)
        if kind == "parquet":
            with pq.ParquetFile(path) as file:
                if self.column not in file.schema_arrow.names:
                    raise HarvestError(
                        f"{path} has no column {self.column!r}; it has {', '.join(file.schema_arrow.names)}. "
                        "column= says which one holds the texts or token ids."
                    )
                for batch in file.iter_batches(batch_size=256, columns=[self.column]):
                    yield from batch.column(0).to_pylist()
            return
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for place, line in enumerate(lines, 1):
                line = line.rstrip("\r\n")
                if line:
                    yield line if kind == "text" else self._field(line, f"{path}:{place}")

    def _field(self, line: str, place: str) -> Any:
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise HarvestError(f"{place} is no JSON: {error}") from error
        if not isinstance(found, dict) or self.column not in found:
            names = ", ".join(found) if isinstance(found, dict) else type(found).__name__
            raise HarvestError(f"{place} has no field {self.column!r}; it has {names}. column= says which one to take.")
        return found[self.column]


class TableSource(_Base):
    """A Hugging Face data set, whole or streaming, or a Ray data set."""

    def __init__(self, table: Any, column: str) -> None:
        self.table, self.column = table, column
        self.ray = type(table).__module__.startswith("ray.")
        columns = table.columns() if self.ray else table.column_names
        if columns is not None and column not in columns:
            raise HarvestError(
                f"the data set has no column {column!r}; it has {', '.join(columns)}. "
                "column= says which one holds the texts or token ids."
            )
        if hasattr(table, "__len__") and not self.ray:
            self.total = len(table)
        self.identity = getattr(table, "_fingerprint", None)
        self.description = f"{type(table).__module__.partition('.')[0]}.{type(table).__name__}, column {column!r}"

    def documents(self) -> Iterator[Document]:
        """See `Source`."""
        rows = self._ray_rows() if self.ray else iter(self.table)
        for number, row in enumerate(rows):
            if self.column not in row:
                raise HarvestError(f"document {number} has no column {self.column!r}; it has {', '.join(row)}")
            yield document(row[self.column], number, None)

    def _ray_rows(self) -> Iterator[dict[str, Any]]:
        # Without this, blocks come in the order in which they are done, and a document's number means nothing.
        self.table.context.execution_options.preserve_order = True
        yield from self.table.iter_rows()


def document(item: Any, number: int, place: str | None) -> Document:
    """A document as given, checked.

    Args:
        item: a text, or token ids (a list, an array, a tensor).
        number: which document it is.
        place: where it is from, for the error.

    Raises:
        HarvestError: it is neither.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, Tensor):
        item = item.cpu().numpy()
    if isinstance(item, list | tuple | np.ndarray):
        ids = np.asarray(item)
        if ids.ndim == 1 and (np.issubdtype(ids.dtype, np.integer) or not len(ids)):
            return cast("Document", ids.astype(np.int64))
    where = f" of {place}" if place else ""
    raise HarvestError(
        f"document {number}{where} is {type(item).__name__} ({str(item)[:60]!r}); "
        "it must be a text or a row of token ids"
    )


def as_source(given: Any, column: str) -> Source:
    """What reads a source.

    Args:
        given: a list of texts or token ids, a tensor of tokens ``[document, pos]``, an iterator of either, `Files`, a
            path (`pathlib.Path`) or a list of them, a Hugging Face data set, a Ray data set.
        column: where the texts or token ids stand in JSONL, Parquet and data sets.

    Raises:
        HarvestError: it is none of these.
    """
    if isinstance(given, str):
        raise HarvestError(
            f"the source is the str {given[:60]!r}: give [text] for one text, or bridge.harvest.Files(path) for a file"
        )
    if (files := _as_files(given)) is not None:
        return FilesSource(files, column)
    package = type(given).__module__.partition(".")[0]
    if package == "datasets" or (package == "ray" and hasattr(given, "iter_rows")):
        if isinstance(given, dict):
            raise HarvestError(f"the source is a {type(given).__name__} of {', '.join(given)}: give one of them")
        return TableSource(given, column)
    return _items(given)


def _as_files(given: Any) -> Files | None:
    """The files that a source is."""
    if isinstance(given, Path):
        return Files(given)
    if isinstance(given, list | tuple) and given and all(isinstance(item, Path) for item in given):
        return Files(*given)
    return given if isinstance(given, Files) else None


def _items(given: Any) -> ItemsSource:
    """What reads texts or token ids that are in memory, or come one after the other.

    Raises:
        HarvestError: it is neither.
    """
    if isinstance(given, Tensor | np.ndarray) and given.ndim != 2:
        raise HarvestError(f"a tensor of tokens must be [document, pos], not {list(given.shape)}")
    if isinstance(given, list | tuple) and given and isinstance(given[0], int | np.integer):
        raise HarvestError("the source is one row of token ids: give a list of rows, [ids]")
    if isinstance(given, Tensor | np.ndarray | list | tuple):
        return ItemsSource(given, len(given))
    if isinstance(given, Iterable):
        return ItemsSource(given, None)
    raise HarvestError(
        f"the source is {type(given).__name__}; it must be a list or an iterator of texts or token ids, a tensor "
        "[document, pos], Files, a path, a Hugging Face data set or a Ray data set"
    )
