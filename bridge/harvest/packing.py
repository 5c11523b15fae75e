"""From documents to the model's inputs, and from those to shards: always the same ones, from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from bridge.harvest.errors import HarvestError
from bridge.harvest.sources import Document, Source

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

    def __init__(self, source: Source, tokenizer: Any, tokens: Tokenization) -> None:
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

    def _encoded(self, after: Cursor) -> Iterator[tuple[int, Document, np.ndarray[Any, np.dtype[Any]]]]:
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
        parts: list[tuple[int, int, np.ndarray[Any, np.dtype[Any]], int]] = []
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
        self, parts: list[tuple[int, int, np.ndarray[Any, np.dtype[Any]], int]], place: tuple[int, int]
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
