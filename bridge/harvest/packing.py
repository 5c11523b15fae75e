"""From documents to the model's inputs, and from those to shards: always the same ones, from any
place on.
"""

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

from bridge.arguments import TokenPositions, listed, shown
from bridge.harvest.fingerprint import HarvestError
from bridge.run.spans import Chat, Spans, chat_ids, is_chat, spans_of

# --------------------------------------------------------------------------------------------------
# Sources of documents: lists, iterators, files, Hugging Face data sets, Ray data sets.
# --------------------------------------------------------------------------------------------------


#: An array of any kind of numbers, and of whole numbers.
Array = np.ndarray[Any, np.dtype[Any]]
Int32Array = np.ndarray[Any, np.dtype[np.int32]]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]
#: One document: a text, a chat, or token ids.
Document = str | Chat | Int64Array
#: Positions whose rows are written: the same in each document, or a function from a chat's spans.
Positions = Sequence[int] | Callable[[Spans], TokenPositions]


@dataclass(frozen=True)
class DocumentSource:
    """Documents in a fixed order.

    Attributes:
        read: starts reading; yields each document's text, chat or token ids, and the file that
            contains it, if any.
        description: a description for the manifest.
        total: the number of documents, if it is known without reading them.
        identity: data that identify the source without reading it, if there are any.
    """

    read: Callable[[], Iterable[tuple[Any, str | None]]]
    description: str
    total: int | None = None
    identity: Any = None

    def documents(self) -> Iterator[Document]:
        """Yield the documents, checked. This exhausts an iterator."""
        return (document(item, number, place) for number, (item, place) in enumerate(self.read()))


@dataclass(frozen=True)
class Files:
    """Files with documents: ``.txt`` (a document on each line), ``.jsonl`` (an object on each
    line), ``.parquet``.

    ``.txt`` and ``.jsonl`` may end in ``.gz``. Empty lines are skipped.

    Args:
        patterns: paths or globs, read in sorted order within each glob.

    Raises:
        FileNotFoundError: a pattern that matches nothing.
        HarvestError: a file of an unsupported kind.

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
        paths: list[str] = []
        for path_or_glob in patterns:
            pattern = os.fspath(path_or_glob)
            matches = [pattern]
            if not os.path.isfile(pattern):
                matches = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
            if not matches:
                raise FileNotFoundError(f"no file matches {pattern!r}")
            paths += matches
        if not paths:
            raise HarvestError("Files() was given no path")
        for path in paths:
            if _kind(path) is None:
                raise HarvestError(
                    f"{path} is no file that can be read: .txt, .jsonl (each also .gz) and"
                    " .parquet can"
                )
        object.__setattr__(self, "paths", tuple(paths))


def _kind(path: str) -> str | None:
    """Return ``"text"``, ``"json"`` or ``"parquet"``; None for any other file."""
    name = path.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return "json"
    if name.endswith(".txt"):
        return "text"
    return "parquet" if path.endswith(".parquet") else None


def _file_source(files: Files, column: str) -> DocumentSource:
    """Return the documents of files."""
    identity = []
    for path in files.paths:
        stat = os.stat(path)
        identity.append([path, stat.st_size, stat.st_mtime_ns])

    def read() -> Iterator[tuple[Any, str]]:
        for path in files.paths:
            for item in _items_in(path, column):
                yield item, path

    return DocumentSource(read, listed(files.paths), identity=identity)


def _items_in(path: str, column: str) -> Iterator[Any]:
    """Yield the documents of a file.

    The readers of `datasets` are not suitable: its JSON reader converts texts that look like dates,
    and its errors do not name the line.
    """
    kind = _kind(path)
    if kind == "parquet":
        yield from _parquet_items(path, column)
        return
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            line = line.rstrip("\r\n")
            if line:
                yield line if kind == "text" else _field(line, column, f"{path}:{number}")


def _parquet_items(path: str, column: str) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise HarvestError(
                f"{path} has no column {column!r}; it has {', '.join(names)}."
                " column= says which one holds the texts or token ids."
            )
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            yield from batch.column(0).to_pylist()


def _field(line: str, column: str, place: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise HarvestError(f"{place} is no JSON: {error}") from error
    if not isinstance(value, dict) or column not in value:
        names = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise HarvestError(
            f"{place} has no field {column!r}; it has {names}. column= says which one to take."
        )
    return value[column]


def _table_source(table: Any, column: str) -> DocumentSource:
    """Return the documents of a Hugging Face data set, streaming or not, or of a Ray data set."""
    package = type(table).__module__.partition(".")[0]
    is_ray = package == "ray"
    columns = table.columns() if is_ray else table.column_names
    if columns is not None and column not in columns:
        raise HarvestError(
            f"the data set has no column {column!r}; it has {', '.join(columns)}. "
            "column= says which one holds the texts or token ids."
        )

    def read() -> Iterator[tuple[Any, None]]:
        rows = table
        if is_ray:  # blocks would come as they finish, and documents have to keep their numbers
            table.context.execution_options.preserve_order = True
            rows = table.iter_rows()
        for number, row in enumerate(rows):
            if column not in row:
                raise HarvestError(
                    f"document {number} has no column {column!r}; it has {', '.join(row)}"
                )
            yield row[column], None

    total = len(table) if hasattr(table, "__len__") and not is_ray else None
    description = f"{package}.{type(table).__name__}, column {column!r}"
    return DocumentSource(read, description, total, getattr(table, "_fingerprint", None))


def document(item: Any, number: int, place: str | None) -> Document:
    """Return a document, checked.

    Args:
        item: a text, a chat, or token ids (a list, an array, a tensor).
        number: the number of the document.
        place: its location, for the error.

    Raises:
        HarvestError: it is neither.
    """
    if isinstance(item, str) or is_chat(item):
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
        "it must be a text, a chat or a row of token ids"
    )


def as_source(source: Any, column: str) -> DocumentSource:
    """Return the documents of a source.

    Args:
        source: a list of texts, chats or token ids, a tensor of tokens ``[document, pos]``, an
            iterator of these, `Files`, a path (`pathlib.Path`) or a list of them, a Hugging Face
            data set, a Ray data set.
        column: the column with texts or token ids in JSONL, Parquet and data sets.

    Raises:
        HarvestError: it is none of these.
    """
    if isinstance(source, str):
        raise HarvestError(
            f"the source is the str {source[:60]!r}: give [text] for one text, or"
            " bridge.harvest.Files(path) for a file"
        )
    paths = [source] if isinstance(source, Path) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(p, Path) for p in paths):
        source = Files(*paths)
    if isinstance(source, Files):
        return _file_source(source, column)
    package = type(source).__module__.partition(".")[0]
    if package == "datasets" or (package == "ray" and hasattr(source, "iter_rows")):
        if isinstance(source, dict):
            raise HarvestError(
                f"the source is a {type(source).__name__} of {', '.join(source)}: give one of them"
            )
        return _table_source(source, column)
    return _memory_source(source)


def _memory_source(source: Any) -> DocumentSource:
    """Return the documents of a list, an array or an iterator.

    Raises:
        HarvestError: it is none of them.
    """
    if isinstance(source, Tensor | np.ndarray) and source.ndim != 2:
        raise HarvestError(f"a tensor of tokens must be [document, pos], not {list(source.shape)}")
    if isinstance(source, list | tuple) and source and isinstance(source[0], int | np.integer):
        raise HarvestError("the source is one row of token ids: give a list of rows, [ids]")
    if not isinstance(source, Iterable):
        raise HarvestError(
            f"the source is {type(source).__name__}; it must be a list or an iterator of texts,"
            " chats or token ids, a tensor [document, pos], Files, a path, a Hugging Face data set"
            " or a Ray data set"
        )
    total, description = None, "an iterator"
    if isinstance(source, Tensor | np.ndarray | list | tuple):
        total = len(source)
        description = f"{total} documents in memory"
    return DocumentSource(lambda: zip(source, repeat(None)), description, total)


# --------------------------------------------------------------------------------------------------
# The model's inputs, and their shards.
# --------------------------------------------------------------------------------------------------


_TOGETHER = 64  # texts in one call of the tokenizer

#: Tokens, their documents and their positions; see `ShardInput`.
_Tokens = tuple[Int32Array, Int64Array, Int32Array]


@dataclass(frozen=True)
class Cursor:
    """A place in a source, between two of the model's inputs.

    Attributes:
        documents: the number of documents that are finished.
        offset: the position in the next document, in tokens.
        source: the fingerprint of the finished documents.
    """

    documents: int
    offset: int
    source: str


START = Cursor(0, 0, xxhash.xxh3_128().hexdigest())


@dataclass(frozen=True)
class Tokenization:
    """The rules that turn documents into the model's inputs.

    Attributes:
        context_size: the maximum number of tokens in an input.
        bos: the id that every input starts with, or None.
        separator: the id that follows every document, or None.
        pack: whether each input is filled with several documents; otherwise it has one document.
        positions: the tokens whose rows are written; None: all.
    """

    context_size: int
    bos: int | None
    separator: int | None
    pack: bool
    positions: Positions | None = None


@dataclass
class ShardInput:
    """The inputs of one shard.

    Attributes:
        index: the shard's index.
        first_sequence: the number of its first input among all inputs.
        tokens: ``[token]``, the concatenated inputs.
        documents: ``[token]``, the number of each token's document (for BOS: of the document after
            it).
        positions: ``[token]``, each token's position in its document; -1 for BOS and separators,
            -2 for tokens whose rows are not written.
        lengths: ``[sequence]``, the number of tokens in each input.
        after: the place in the source after them.
    """

    index: int
    first_sequence: int
    tokens: Int32Array
    documents: Int64Array
    positions: Int32Array
    lengths: Int32Array
    after: Cursor

    def fingerprint(self) -> str:
        """Return the hash of the inputs."""
        total = xxhash.xxh3_128()
        for array in (self.tokens, self.documents, self.positions, self.lengths):
            total.update(array.tobytes())
        return total.hexdigest()


class SourceReader:
    """The reader of a source, with a hash of the documents that it has read.

    Args:
        source: the documents.
        tokenizer: a Hugging Face tokenizer; None if the documents are token ids.
        tokens: the rules that turn them into inputs.

    Attributes:
        read: the number of documents that were started.
    """

    def __init__(self, source: DocumentSource, tokenizer: Any, tokens: Tokenization) -> None:
        self.source, self.tokenizer, self.tokens = source, tokenizer, tokens
        self.read = 0
        self._hash = xxhash.xxh3_128()

    def shards(
        self,
        per_shard: int,
        after: Cursor = START,
        index: int = 0,
        sequence: int = 0,
        most: int | None = None,
    ) -> Iterator[ShardInput]:
        """Yield the inputs of each shard.

        Args:
            per_shard: the number of tokens in a shard (a shard ends with the input that reaches
                it).
            after: begin at this place of the source.
            index, sequence: the numbers of the first shard and input.
            most: end with the input that reaches this many tokens.

        Raises:
            HarvestError: the source does not begin with the documents before `after`.
        """
        inputs: list[_Tokens] = []
        size = total = 0
        for tokens, place in self._sequences(after):
            inputs.append(tokens)
            length = len(tokens[0])
            size += length
            total += length
            is_last = most is not None and total >= most
            if size >= per_shard or is_last:
                yield self._shard(inputs, index, sequence, place)
                if is_last:
                    return
                index += 1
                sequence += len(inputs)
                inputs, size = [], 0
        if inputs:
            yield self._shard(inputs, index, sequence, place)

    def _shard(
        self, inputs: Sequence[_Tokens], index: int, sequence: int, place: tuple[int, int]
    ) -> ShardInput:
        """Return the shard of some inputs, with the place in the source after them."""
        after = Cursor(*place, self._hash.hexdigest())
        lengths = np.array([len(tokens) for tokens, *_ in inputs], np.int32)
        return ShardInput(index, sequence, *_join(inputs), lengths, after)

    def check(self, expected: Cursor, ended: bool) -> None:
        """Read a source, without tokenizing it, and compare it with the source of a finished
        harvest.

        Args:
            expected: the place in the source where that harvest ended.
            ended: whether the source ended there.

        Raises:
            HarvestError: it is a different source.
        """
        documents = self.source.documents()
        self._skip(documents, expected)
        if ended and next(documents, None) is not None:
            raise HarvestError(
                f"the source has more than the {expected.documents} documents that this folder's"
                " harvest is of. Give the same source, or another folder for `out`."
            )

    def _skip(self, documents: Iterator[Document], expected: Cursor) -> None:
        for document in islice(documents, expected.documents):
            self._note(document)
            self.read += 1
        if self.read < expected.documents or self._hash.hexdigest() != expected.source:
            raise HarvestError(
                "the source is another than the one that the shards were made from: its first"
                f" {expected.documents} documents differ. Give the same source, or another folder"
                " for `out`."
            )

    @property
    def end(self) -> Cursor:
        """The place after all documents that were read, once `shards` has reached the source's
        end."""
        return Cursor(self.read, 0, self._hash.hexdigest())

    def _note(self, document: Document) -> None:
        """Add a document to the fingerprint."""
        if isinstance(document, str):
            kind, data = b"t", document.encode("utf-8", "surrogatepass")
        elif is_chat(document):
            kind, data = b"c", json.dumps(document, sort_keys=True, default=str).encode()
        else:
            kind, data = b"i", cast("Int64Array", document).tobytes()
        self._hash.update(kind + len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def _encoded(self, after: Cursor) -> Iterator[tuple[int, Document, Array, Int32Array]]:
        """Yield documents: their numbers, their ids with the separator's, and the tokens' positions
        (see `ShardInput`).
        """
        documents = self.source.documents()
        self._skip(documents, after)
        number = after.documents
        separator = self.tokens.separator
        while batch := list(islice(documents, _TOGETHER)):
            texts = [document for document in batch if isinstance(document, str)]
            rows = iter(self._encode(texts, number))
            for document in batch:
                row: Any = document
                if is_chat(document):
                    row = self._chat_ids(document, number)
                elif isinstance(document, str):
                    row = next(rows)
                ids = np.asarray(row, dtype=np.int32)
                positions = self._positions(document, number, len(ids))
                if separator is not None and len(ids):
                    ids = np.append(ids, np.int32(separator))
                    positions = np.append(positions, np.int32(-1))
                yield number, document, ids, positions
                number += 1

    def _chat_ids(self, chat: Chat, number: int) -> list[int]:
        """Return the tokens of a chat.

        Raises:
            HarvestError: inputs begin with BOS, or there is no tokenizer with a chat template.
        """
        if self.tokens.bos is not None:
            raise HarvestError(
                f"document {number} is a chat, and inputs begin with BOS: whether a chat does, its"
                " template says. Pass prepend_bos=False"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise HarvestError(
                f"document {number} is a chat, and there is no tokenizer with a chat template: give"
                " tokenizer="
            )
        return chat_ids(self.tokenizer, chat)

    def _positions(self, document: Document, number: int, length: int) -> Int32Array:
        """Return the positions of a document's tokens, -2 for those whose rows are not written.

        Raises:
            HarvestError: they are chosen by a function, and the document is no chat.
        """
        positions = np.arange(length, dtype=np.int32)
        chosen = self.tokens.positions
        if chosen is None:
            return positions
        if callable(chosen):
            if not is_chat(document):
                raise HarvestError(
                    f"positions is a function, which chooses spans of chats, and document {number}"
                    " is none"
                )
            spans = chosen(spans_of(self.tokenizer, document))
            if not isinstance(spans, TokenPositions):
                raise HarvestError(f"positions returned {shown(spans)}; it must return spans")
            chosen = spans.positions
        positions[~np.isin(positions, list(chosen))] = -2
        return positions

    def _encode(self, texts: list[str], number: int) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer is None:
            raise HarvestError(
                f"document {number} or after is a text, and there is no tokenizer: give tokenizer="
            )
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _sequences(self, after: Cursor) -> Iterator[tuple[_Tokens, tuple[int, int]]]:
        """Yield the inputs, each with the place in the source after it."""
        room = self.tokens.context_size - (self.tokens.bos is not None)
        parts: list[_Tokens] = []
        size, offset = 0, after.offset
        for number, document, ids, positions in self._encoded(after):
            self.read = number + 1
            while offset < len(ids):
                part = ids[offset : offset + room - size]
                documents = np.full(len(part), number, np.int64)
                parts.append((part, documents, positions[offset : offset + len(part)]))
                offset += len(part)
                size += len(part)
                if offset < len(ids):  # the input is full
                    yield self._with_bos(parts), (number, offset)
                    parts, size = [], 0
            self._note(document)
            offset = 0
            # The place of an input that ends with its document is after the document.
            if parts and (size == room or not self.tokens.pack):
                yield self._with_bos(parts), (self.read, 0)
                parts, size = [], 0
        if parts:
            yield self._with_bos(parts), (self.read, 0)

    def _with_bos(self, parts: list[_Tokens]) -> _Tokens:
        """Join parts of documents to one input, with BOS."""
        bos = self.tokens.bos
        if bos is None:
            return _join(parts)
        _, documents, _ = parts[0]
        first = np.array([bos], np.int32), documents[:1], np.array([-1], np.int32)
        return _join([first, *parts])


def _join(parts: Sequence[_Tokens]) -> _Tokens:
    """Return consecutive tokens as one part."""
    tokens, documents, positions = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(documents), np.concatenate(positions)
