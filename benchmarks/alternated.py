"""Things done in turn in one process: the time of each, and its ratio to the first in the same
round, with its spread.

The first is done twice in every round. The ratio of the two says what the machine adds by itself: a
figure whose distance from 1 is not larger than that is none.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from instructions import InstructionCounter

#: The name of the second of the two.
NULL = "the same once more"


@dataclass(frozen=True)
class Timed:
    """What was measured of one thing.

    Attributes:
        rounds: its seconds, by round.
        first: those of the first thing.
        instructions: of the processor, to those of the first thing, lower quartiles; None where
            nothing counts them.
    """

    rounds: tuple[float, ...]
    first: tuple[float, ...]
    instructions: float | None = None

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.rounds)

    @property
    def ratios(self) -> list[float]:
        """To the first, round by round."""
        return [own / first for own, first in zip(self.rounds, self.first, strict=True)]

    def __str__(self) -> str:
        counted = "" if self.instructions is None else f"  {self.instructions:6.3f} by instructions"
        return f"{self.seconds * 1e3:9.3f} ms  {spread(self.ratios)}{counted}"


def spread(values: list[float]) -> str:
    """The median, and between which values half of them lie.

    Args:
        values: one for each round, two or more.
    """
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:6.3f} ({low:.3f} to {high:.3f})"


def alternated(
    jobs: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str = "cpu",
    seconds: float | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, Timed]:
    """Does things in turn, in another order in each round; `NULL` is the first of them once more.

    Args:
        jobs: what to do, by name; the first is what the others are compared with.
        rounds: how often, two times or more. Once more is not counted.
        device: ``cuda`` is waited for.
        seconds: after so many, no further round is begun, if there were five; None: all rounds.
        clock: what tells the time: ``time.process_time`` on one thread of a busy machine; None: the
            clock on the wall.
    """
    clock = time.perf_counter if clock is None else clock
    first = next(iter(jobs))
    both = {first: jobs[first], NULL: jobs[first], **jobs}
    found: dict[str, list[float]] = {name: [] for name in both}
    counted: dict[str, list[int]] = {name: [] for name in both}
    order, counter = random.Random(0), InstructionCounter()
    begun = time.perf_counter()
    for number in range(rounds + 1):
        if seconds is not None and number > 5 and time.perf_counter() - begun > seconds:
            break
        gc.collect()
        for name in order.sample(list(both), len(both)):
            _wait(device)
            before, start = counter.now(), clock()
            kept = both[name]()
            _wait(device)
            if number:
                found[name].append(clock() - start)
                if before is not None:
                    counted[name].append((counter.now() or 0) - before)
            del kept  # what it made is freed outside of its time, as what the others made
    alone = torch.get_num_threads() == 1 and device == "cpu" and bool(counted[first])
    least = {
        name: sorted(counts)[len(counts) // 4] if alone else 0 for name, counts in counted.items()
    }
    return {
        name: Timed(
            tuple(times), tuple(found[first]), least[name] / least[first] if alone else None
        )
        for name, times in found.items()
    }


def row(label: str, timed: Timed) -> None:
    """Prints one figure.

    Args:
        label: what it is.
        timed: what was measured.
    """
    print(f"  {label:<58} {timed}", flush=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
