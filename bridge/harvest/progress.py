"""How far a harvest is, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm


@dataclass(frozen=True)
class Progress:
    """How far a harvest is.

    Attributes:
        shards, tokens: done in this call.
        seconds: since it began.
        tokens_per_second: in this call.
        seconds_left: by the share of the documents that are used up; None where their number is not known.
        model_share: the share of the time that was spent in the model (of all workers' time).
    """

    shards: int
    tokens: int
    seconds: float
    tokens_per_second: float
    seconds_left: float | None
    model_share: float

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{self.tokens:,} tokens in {self.shards} shards, {self.tokens_per_second:,.0f} tokens/s{left}, "
            f"{self.model_share:.0%} of the time in the model"
        )


@dataclass(frozen=True)
class Report:
    """What came of a harvest.

    Attributes:
        path: its folder.
        shards, rows, sequences, tokens, size: of the whole harvest (size in bytes).
        made: how many of the shards this call made; the others stood already.
        seconds, tokens_per_second, model_share: of this call.
    """

    path: Path
    shards: int
    rows: int
    sequences: int
    tokens: int
    size: int
    made: int
    seconds: float
    tokens_per_second: float
    model_share: float

    def __str__(self) -> str:
        speed = f" at {self.tokens_per_second:,.0f} tokens/s, {self.model_share:.0%} of the time in the model"
        return (
            f"{self.path}: {self.rows:,} rows of {self.tokens:,} tokens in {self.shards} shards "
            f"({self.size / 1e6:,.1f} MB); {self.made} made now" + speed * bool(self.made)
        )


class Meter:
    """Counts, and shows.

    Args:
        show: True for a line on the terminal; a function is called with a `Progress` after each shard.
        total: how many documents the source has, where that is known.
        before: how many were used up before this call.
        workers: how many work at a time.
    """

    def __init__(self, show: bool | Callable[[Progress], object], total: int | None, before: int, workers: int) -> None:
        self._call = show if callable(show) else None
        self._bar = tqdm(unit="tok", unit_scale=True, desc="harvest") if show is True else None
        self.total, self.before, self.workers = total, before, workers
        self.start = time.perf_counter()
        self.shards = self.tokens = self.documents = 0
        self.model_seconds = 0.0

    def now(self) -> Progress:
        """How far it is."""
        seconds = time.perf_counter() - self.start
        used = self.documents - self.before
        left = None
        if self.total is not None and used > 0:
            left = seconds * max(0, self.total - self.documents) / used
        rate = self.tokens / seconds if seconds else 0.0
        share = min(1.0, self.model_seconds / (seconds * self.workers)) if seconds else 0.0
        return Progress(self.shards, self.tokens, seconds, rate, left, share)

    def add(self, tokens: int, documents: int, model_seconds: float) -> None:
        """Counts one shard.

        Args:
            tokens: that it is from.
            documents: how many are used up behind it.
            model_seconds: time that it took in the model.
        """
        self.shards += 1
        self.tokens += tokens
        self.documents = max(self.documents, documents)
        self.model_seconds += model_seconds
        now = self.now()
        if self._call is not None:
            self._call(now)
        if self._bar is not None:
            left = "?" if now.seconds_left is None else f"{now.seconds_left:.0f} s"
            self._bar.set_postfix_str(f"{now.model_share:.0%} in the model, {left} left", refresh=False)
            self._bar.update(tokens)

    def close(self) -> None:
        """Ends the line on the terminal."""
        if self._bar is not None:
            self._bar.close()
