"""What a block adds to the residual stream: its ordered steps, each a sum of what modules put out, with factors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapters.automatic.layouts import parameter_of
from adapters.automatic.norms import tolerance
from adapters.automatic.recording import Mark, ModuleCall, Recording, Seen


@dataclass(eq=False)
class Value:
    """A tensor of the stream's shape inside a block, with everyone who puts it out or is given it.

    Attributes:
        x: its numbers, in rows, float64.
        mark: see `recording.mark`.
        made: the calls that put it out, by their end.
        read: the calls that are given it, by their start.
        seen: when it was seen first.
    """

    x: Tensor
    mark: Mark
    made: list[tuple[ModuleCall, Seen]] = field(default_factory=list)
    read: list[ModuleCall] = field(default_factory=list)
    seen: int = 0


@dataclass(frozen=True, eq=False)
class Term:
    """What is added to the stream: a value, times a factor, and a parameter of the block beside it."""

    value: Value
    factor: float
    bias: str | None = None


@dataclass(frozen=True, eq=False)
class Sum:
    """One sum on the stream.

    Attributes:
        before: the stream that it is made from.
        after: the stream that it makes.
        terms: what is added, in the order of the computation.
        norm: the norm on the stream behind it: its call. The next sum is made from what that puts out.
        start, end: the times between which its parts run.
    """

    before: Value
    after: Value
    terms: tuple[Term, ...]
    start: int
    end: int
    norm: ModuleCall | None = None


def values_in(block: ModuleCall, recording: Recording, shape: Sequence[int]) -> dict[Mark, Value]:
    """All tensors with as many numbers as the stream, and its width, that pass a module's border inside a block."""
    assert block.entered is not None
    numel, width = block.entered.value.numel(), shape[-1]
    found: dict[Mark, Value] = {}

    def at(seen: Seen, time: int) -> Value | None:
        if seen.value.numel() != numel or seen.value.shape[-1] != width:
            return None
        return found.setdefault(seen.mark, Value(seen.value.double().flatten(), seen.mark, seen=time))

    entry = at(block.entered, block.start)
    assert entry is not None
    events: list[tuple[int, ModuleCall, Seen]] = []
    for call in recording.between(block.start, block.end):
        if call.entered:
            events.append((call.start, call, call.entered))
        events += [(call.end, call, seen) for seen in call.left]
    for time, call, seen in sorted(events, key=lambda event: event[0]):
        if (value := at(seen, time)) is not None:
            if time == call.start:
                value.read.append(call)
            else:
                value.made.append((call, seen))
    return found


class Sums:
    """Finds the sums of one block.

    Args:
        block: its call.
        output: what it passes on.
        recording: the run.
        norms: the calls in it that are norms.
    """

    def __init__(self, block: ModuleCall, output: Seen, recording: Recording, norms: Sequence[ModuleCall]) -> None:
        assert block.entered is not None
        self.block, self.norms = block, norms
        self.values = values_in(block, recording, block.entered.value.shape)
        self.x = self.values[block.entered.mark]
        self.y = self.values.get(output.mark) or Value(output.value.double().flatten(), output.mark, seen=block.end)
        self.close = tolerance(block.entered.value)
        self.outputs = [v for v in self.values.values() if v.made and bool(v.x.abs().max() > 0)]

    def find(self) -> list[Sum] | None:
        """The sums, in order, from what enters the block to what leaves it; None where they do not explain it."""
        return self._plain() or self._normed()

    def _states(self) -> list[Value]:
        """What may be the stream between two steps: what some module is given that none put out as its own part."""
        return sorted((v for v in self.values.values() if v.read and v not in (self.x, self.y)), key=lambda v: v.seen)

    def _plain(self) -> list[Sum] | None:
        """No norm stands on the stream: the most sums that lead from the first to the last."""
        best: dict[Mark, list[Sum]] = {self.x.mark: []}
        reached: list[tuple[Value, int]] = [(self.x, self.block.start)]
        for state in [*self._states(), self.y]:
            end = self.block.end if state is self.y else state.seen
            paths = []
            for before, start in reached:
                terms = self.explain(state.x - before.x, start, end)
                if terms is not None:
                    paths.append([*best[before.mark], Sum(before, state, terms, start, end)])
                    if state is not self.y:
                        break  # the first that explains it has the fewest terms behind it
            if paths:
                best[state.mark] = max(paths, key=len)
                reached.insert(0, (state, state.seen))
        return best.get(self.y.mark) or None

    def _normed(self) -> list[Sum] | None:
        """Norms stand on the stream."""
        sums: list[Sum] = []
        before, start = self.x, self.block.start
        for norm in sorted(self.norms, key=lambda call: call.start):
            assert norm.entered is not None
            after = self.values.get(norm.entered.mark)
            following = self.values.get(norm.left[0].mark)
            if after is None or following is None or norm.start < start:
                continue
            terms = self.explain(after.x - before.x, start, norm.start)
            if terms is None:
                continue
            sums.append(Sum(before, after, terms, start, norm.start, norm))
            before, start = following, norm.end
        return sums if sums and before.mark == self.y.mark else None

    def explain(self, difference: Tensor, start: int, end: int) -> tuple[Term, ...] | None:
        """What modules put out between two times whose sum, each with a factor, is a difference of streams."""
        square = float(difference @ difference)
        candidates = [v for v in self.outputs if start < v.made[0][0].end <= end]
        if square == 0 or not candidates:
            return None
        matrix = torch.stack([v.x for v in candidates])
        gram, dots = matrix @ matrix.T, matrix @ difference
        bound = (self.close**2) * max(square, 1e-30) * 4

        def left(weights: dict[int, float]) -> float:
            """The square of what is left of the difference."""
            rest = difference - torch.stack([candidates[i].x * w for i, w in weights.items()]).sum(0)
            return float(rest @ rest)

        def terms(weights: dict[int, float]) -> tuple[Term, ...]:
            made = sorted(weights, key=lambda i: candidates[i].made[0][0].end)
            return tuple(Term(candidates[i], weights[i]) for i in made)

        n, d = len(candidates), dots.tolist()
        g = gram.tolist()
        rough = 1e-6 * square + bound  # a first look, by sums of squares that lose digits
        for i in range(n):
            if abs(square - 2 * d[i] + g[i][i]) <= rough and left({i: 1.0}) <= bound:
                return terms({i: 1.0})
        pairs = list(itertools.combinations(range(n), 2))
        for i, j in pairs:
            rest = square - 2 * (d[i] + d[j]) + g[i][i] + g[j][j] + 2 * g[i][j]
            if abs(rest) <= rough and left({i: 1.0, j: 1.0}) <= bound:
                return terms({i: 1.0, j: 1.0})
        for i in range(n):
            factor = d[i] / g[i][i]
            if abs(square - factor * d[i]) <= rough and abs(factor) > 1e-3 and left({i: factor}) <= bound:
                return terms({i: _rounded(factor)})
        for i, j in pairs:
            det = g[i][i] * g[j][j] - g[i][j] ** 2
            if det < 1e-9 * g[i][i] * g[j][j]:
                continue
            u, v = (d[i] * g[j][j] - d[j] * g[i][j]) / det, (d[j] * g[i][i] - d[i] * g[i][j]) / det
            rest = square - u * d[i] - v * d[j]
            if min(abs(u), abs(v)) > 1e-3 and abs(rest) <= rough and left({i: u, j: v}) <= bound:
                return terms({i: _rounded(u), j: _rounded(v)})
        return self._with_parameter(difference, candidates)

    def _with_parameter(self, difference: Tensor, candidates: Sequence[Value]) -> tuple[Term, ...] | None:
        """One value, and a parameter of the block that is added to it at every position."""
        assert self.block.entered is not None
        width, close = self.block.entered.value.shape[-1], 10 * self.close * float(difference.abs().max())
        for value in candidates:
            rows = (difference - value.x).view(-1, width)
            if bool(((rows - rows[0]).abs() <= close).all()):
                name = parameter_of(self.block.module, rows.mean(0), close)
                if name is not None:
                    return (Term(value, 1.0, name),)
        return None


def _rounded(factor: float) -> float:
    """A factor as it was written: six digits say as much as the run does."""
    return float(f"{factor:.5g}")
