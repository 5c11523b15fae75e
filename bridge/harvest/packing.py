"""From documents to the model's inputs, and from those to shards: always the same ones, from any place on."""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import xxhash
from torch import Tensor

from bridge.harvest.fingerprint import HarvestError
from bridge.hooks.arguments import listed

# ----------------------------------------------------------------------------------------------------------------------
# Where documents come from: lists, iterators, files, Hugging Face data sets, Ray data sets.
# ----------------------------------------------------------------------------------------------------------------------


#: An array of any kind of numbers.
Array = np.ndarray[Any, np.dtype[Any]]
#: One document: a text, or token ids.
Document = str | np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class DocumentSource:
    """Documents in a fixed order.

    Attributes:
        read: begins to read them: for each the text or token ids, and the file that it is from, if there is one.
        description: what it is, for the manifest.
        total: how many there are, where that can be had without reading them.
        identity: what tells it from another source without reading it, where there is such a thing.
    """

    read: Callable[[], Iterable[tuple[Any, str | None]]]
    description: str
    total: int | None = None
    identity: Any = None

    def documents(self) -> Iterator[Document]:
        """The documents, checked; an iterator is used up by it."""
        return (document(item, number, place) for number, (item, place) in enumerate(self.read()))


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


def _of_files(files: Files, column: str) -> DocumentSource:
    """What reads files."""
    paths = files.paths
    identity = [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths]
    description = listed(paths)
    read = lambda: ((item, path) for path in paths for item in _items_in(path, column))
    return DocumentSource(read, description, identity=identity)


def _items_in(path: str, column: str) -> Iterator[Any]:
    """What a file holds, one after the other."""
    kind = _kind(path)
    if kind == "parquet":
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise HarvestError(
                    f"{path} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}. "
                    "column= says which one holds the texts or token ids."
                )
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                yield from batch.column(0).to_pylist()
        return
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for place, line in enumerate(lines, 1):
            line = line.rstrip("\r\n")
            if line:
                yield line if kind == "text" else _field(line, column, f"{path}:{place}")


def _field(line: str, column: str, place: str) -> Any:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise HarvestError(f"{place} is no JSON: {error}") from error
    if not isinstance(found, dict) or column not in found:
        names = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise HarvestError(f"{place} has no field {column!r}; it has {names}. column= says which one to take.")
    return found[column]


def _of_table(table: Any, column: str) -> DocumentSource:
    """What reads a Hugging Face data set, whole or streaming, or a Ray data set."""
    ray = type(table).__module__.startswith("ray.")
    columns = table.columns() if ray else table.column_names
    if columns is not None and column not in columns:
        raise HarvestError(
            f"the data set has no column {column!r}; it has {', '.join(columns)}. "
            "column= says which one holds the texts or token ids."
        )

    def read() -> Iterator[tuple[Any, None]]:
        if ray:  # else blocks come in the order in which they are done, and a document's number means nothing
            table.context.execution_options.preserve_order = True
        for number, row in enumerate(table.iter_rows() if ray else table):
            if column not in row:
                raise HarvestError(f"document {number} has no column {column!r}; it has {', '.join(row)}")
            yield row[column], None

    total = len(table) if hasattr(table, "__len__") and not ray else None
    description = f"{type(table).__module__.partition('.')[0]}.{type(table).__name__}, column {column!r}"
    return DocumentSource(read, description, total, getattr(table, "_fingerprint", None))


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


def as_source(given: Any, column: str) -> DocumentSource:
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
        return _of_files(files, column)
    package = type(given).__module__.partition(".")[0]
    if package == "datasets" or (package == "ray" and hasattr(given, "iter_rows")):
        if isinstance(given, dict):
            raise HarvestError(f"the source is a {type(given).__name__} of {', '.join(given)}: give one of them")
        return _of_table(given, column)
    return _items(given)


def _as_files(given: Any) -> Files | None:
    """The files that a source is."""
    if isinstance(given, Path):
        return Files(given)
    if isinstance(given, list | tuple) and given and all(isinstance(item, Path) for item in given):
        return Files(*given)
    return given if isinstance(given, Files) else None


def _items(given: Any) -> DocumentSource:
    """What reads texts or token ids that are in memory, or come one after the other.

    Raises:
        HarvestError: it is neither.
    """
    if isinstance(given, Tensor | np.ndarray) and given.ndim != 2:
        raise HarvestError(f"a tensor of tokens must be [document, pos], not {list(given.shape)}")
    if isinstance(given, list | tuple) and given and isinstance(given[0], int | np.integer):
        raise HarvestError("the source is one row of token ids: give a list of rows, [ids]")
    if isinstance(given, Iterable):
        total = len(given) if isinstance(given, Tensor | np.ndarray | list | tuple) else None
        what = "an iterator" if total is None else f"{total} documents in memory"
        return DocumentSource(lambda: zip(given, repeat(None)), what, total)
    raise HarvestError(
        f"the source is {type(given).__name__}; it must be a list or an iterator of texts or token ids, a tensor "
        "[document, pos], Files, a path, a Hugging Face data set or a Ray data set"
    )


_TOGETHER = 64  # texts that the tokenizer is given at a time


@dataclass(frozen=True)
class Cursor:
    """A place in a source, between two of the model's inputs.

    Attributes:
        documents: how many documents are used up.
        offset: how far into the next one it is, in tokens.
        source: the fingerprint of the documents that are used up.
    """

    documents: int
    offset: int
    source: str


START = Cursor(0, 0, xxhash.xxh3_128().hexdigest())


@dataclass(frozen=True)
class Tokenization:
    """How documents become the model's inputs.

    Attributes:
        context_size: tokens in an input, at most.
        bos: the id that every input starts with, or None.
        separator: the id that follows every document, or None.
        pack: an input holds one document after another until it is full; else each is of one document.
    """

    context_size: int
    bos: int | None
    separator: int | None
    pack: bool


@dataclass
class ShardInput:
    """What one shard is made from.

    Attributes:
        index: the shard's place.
        first_sequence: the number of its first input among all.
        tokens: ``[token]``, the inputs one after another.
        documents: ``[token]``, the number of the document that a token is of (BOS: the document that it comes before).
        positions: ``[token]``, the token's place in its document, in tokens; -1 for BOS and separators.
        lengths: ``[sequence]``, how many tokens each input has.
        after: the place in the source behind them.
    """

    index: int
    first_sequence: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    documents: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    after: Cursor

    def fingerprint(self) -> str:
        """The hash of all that the shard is made from."""
        total = xxhash.xxh3_128()
        for array in (self.tokens, self.documents, self.positions, self.lengths):
            total.update(array.tobytes())
        return total.hexdigest()


class SourceReader:
    """Reads a source, and knows what it has read.

    Args:
        source: the documents.
        tokenizer: a Hugging Face tokenizer; None where the documents are token ids.
        tokens: how they become inputs.

    Attributes:
        read: documents that were begun.
    """

    def __init__(self, source: DocumentSource, tokenizer: Any, tokens: Tokenization) -> None:
        self.source, self.tokenizer, self.tokens = source, tokenizer, tokens
        self.read = 0
        self._hash = xxhash.xxh3_128()

    def shards(
        self, per_shard: int, after: Cursor = START, index: int = 0, sequence: int = 0, most: int | None = None
    ) -> Iterator[ShardInput]:
        """What each shard is made from.

        Args:
            per_shard: tokens in a shard (a shard ends with the input that reaches it).
            after: begin at this place of the source.
            index, sequence: the numbers of the first shard and input.
            most: end with the input that reaches this many tokens.

        Raises:
            HarvestError: the source does not begin with the documents that `after` was behind.
        """
        gathered: list[tuple[Any, Any, Any]] = []
        held, total, place = 0, 0, (after.documents, after.offset)
        for *input, place in self._sequences(after):
            gathered.append(tuple(input))
            held += len(input[0])
            total += len(input[0])
            enough = most is not None and total >= most
            if held >= per_shard or enough:
                yield _shard(gathered, index, sequence, self._cursor(place))
                if enough:
                    return
                index, sequence, gathered, held = index + 1, sequence + len(gathered), [], 0
        if gathered:
            yield _shard(gathered, index, sequence, self._cursor(place))

    def check(self, expected: Cursor, whole: bool) -> None:
        """Reads a source, without tokenizing it, and compares it with the one that a finished harvest used up.

        Args:
            expected: how far that harvest went.
            whole: whether the source ended there.

        Raises:
            HarvestError: it is another.
        """
        documents = self.source.documents()
        self._skip(documents, expected)
        if whole and next(documents, None) is not None:
            raise HarvestError(
                f"the source has more than the {expected.documents} documents that this folder's harvest is of. "
                "Give the same source, or another folder for `out`."
            )

    def _skip(self, documents: Iterator[Document], expected: Cursor) -> None:
        for document in islice(documents, expected.documents):
            self._note(document)
            self.read += 1
        if self.read < expected.documents or self._hash.hexdigest() != expected.source:
            raise HarvestError(
                f"the source is another than the one that the shards were made from: its first {expected.documents} "
                "documents differ. Give the same source, or another folder for `out`."
            )

    @property
    def end(self) -> Cursor:
        """The place behind all documents that were read, once `shards` has come to the source's end."""
        return Cursor(self.read, 0, self._hash.hexdigest())

    def _note(self, document: Document) -> None:
        data = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document.tobytes()
        kind = b"t" if isinstance(document, str) else b"i"
        self._hash.update(kind + len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def _cursor(self, place: tuple[int, int]) -> Cursor:
        return Cursor(*place, self._hash.hexdigest())

    def _encoded(self, after: Cursor) -> Iterator[tuple[int, Document, Array]]:
        """Documents with their numbers and token ids, the separator included."""
        documents = self.source.documents()
        self._skip(documents, after)
        number = after.documents
        while together := list(islice(documents, _TOGETHER)):
            texts = [document for document in together if isinstance(document, str)]
            rows = iter(self._encode(texts, number))
            for document in together:
                ids = np.asarray(next(rows) if isinstance(document, str) else document, dtype=np.int32)
                if self.tokens.separator is not None and len(ids):
                    ids = np.append(ids, np.int32(self.tokens.separator))
                yield number, document, ids
                number += 1

    def _encode(self, texts: list[str], number: int) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer is None:
            raise HarvestError(f"document {number} or after is a text, and there is no tokenizer: give tokenizer=")
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _sequences(self, after: Cursor) -> Iterator[tuple[Any, Any, Any, tuple[int, int]]]:
        """Each input: its tokens, their documents, their places in them, and the place in the source behind it."""
        room = self.tokens.context_size - (self.tokens.bos is not None)
        parts: list[tuple[int, int, Array, int]] = []
        held = 0
        offset, begin = after.offset, (after.documents, after.offset)
        for number, document, ids in self._encoded(after):
            self.read = number + 1
            own = len(ids) - (self.tokens.separator is not None and len(ids) > 0)
            while offset < len(ids):
                taken = ids[offset : offset + room - held]
                parts.append((number, offset, taken, own))
                offset += len(taken)
                held += len(taken)
                if held == room or not self.tokens.pack:
                    if offset == len(ids):
                        break  # the document is used up: its place is behind it
                    yield self._sequence(parts, (number, offset))
                    parts, held = [], 0
            self._note(document)
            offset, begin = 0, (number + 1, 0)
            if parts and (held == room or not self.tokens.pack):
                yield self._sequence(parts, begin)
                parts, held = [], 0
        if parts:
            yield self._sequence(parts, begin)

    def _sequence(
        self, parts: list[tuple[int, int, Array, int]], place: tuple[int, int]
    ) -> tuple[Any, Any, Any, tuple[int, int]]:
        tokens = [ids for _, _, ids, _ in parts]
        documents = [np.full(len(ids), number, np.int64) for number, _, ids, _ in parts]
        positions = []
        for _, offset, ids, own in parts:
            at = np.arange(offset, offset + len(ids), dtype=np.int32)
            at[at >= own] = -1
            positions.append(at)
        if self.tokens.bos is not None:
            tokens.insert(0, np.array([self.tokens.bos], np.int32))
            documents.insert(0, np.array([parts[0][0]], np.int64))
            positions.insert(0, np.array([-1], np.int32))
        return np.concatenate(tokens), np.concatenate(documents), np.concatenate(positions), place


def _shard(inputs: Sequence[tuple[Any, Any, Any]], index: int, sequence: int, after: Cursor) -> ShardInput:
    """A shard of inputs: of each its tokens, their documents, and their places in them."""
    tokens, documents, positions = (np.concatenate(parts) for parts in zip(*inputs, strict=True))
    lengths = np.array([len(ids) for ids, *_ in inputs], np.int32)
    return ShardInput(index, sequence, tokens, documents, positions, lengths, after)
