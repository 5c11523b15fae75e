"""What a block adds to the residual stream: its ordered steps, each a sum of what modules put out, with factors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from adapters.automatic.blocks import FoundStack
from adapters.automatic.norms import parameter_of, rounded
from adapters.automatic.parts import Addend, Norms, Parts, Sum, Value, values_in
from adapters.block import Mix, MixElement
from adapters.observe.observe import BorderTensor, Mark, ModuleCall, Recording, mark
from adapters.observe.recognised import FITTED, NEGLIGIBLE, agree, factor_of, worked_out
from adapters.views import Affine, Chain, times, transformed

#: Vectors are parallel where the square of the sine between them is below this: the rounding of float32 (6e-8) leaves
#: about 1e-14, and two that a model adds are random to each other.
_PARALLEL = 1e-9


class Sums(Parts):
    """Those of a block with one stream.

    Args:
        block, recording, norms: as for `Parts`.
        output: what it passes on.
    """

    def __init__(self, block: ModuleCall, output: BorderTensor, recording: Recording, norms: Norms) -> None:
        assert block.entered is not None
        super().__init__(block, recording, norms)
        self.values = values_in(block, recording)
        self.x = self.values[block.entered.mark]
        self.y = self.values.get(output.mark) or Value(output.value.double().flatten(), output.mark, seen=block.end)
        self.width = block.entered.value.shape[-1]
        #: What may be there besides sums: 1: factors on the stream, and terms that were made earlier; 2: a new stream.
        self.search_level = 0
        self.close = worked_out(block.entered.value)
        #: What rounding leaves of a sum of streams, relative to them: parts may write far less than there is.
        self.rounding = 2 * torch.finfo(block.entered.value.dtype).eps
        self.outputs = [v for v in self.values.values() if v.made and bool(v.x.abs().max() > 0)]

    def find(self) -> bool:
        """Finds them in order, from what enters the block to what leaves it."""
        first = [n for n in self.norms if n.reads(self.x.mark)]
        entries = [(self.x, self.block.start, None)] + [
            (following, norm.end, norm) for norm in first if (following := self.values.get(norm.returned.mark))
        ]  # fmt: skip
        for self.search_level in range(3):  # the plainest that explains it
            for x, start, norm in entries:
                if found := self._plain(x, start) or self._normed(x, start):
                    self.sums, self.norm = found, norm
                    return True
        return False

    def _states(self, x: Value) -> list[Value]:
        """What may be the stream between two steps: what some module is given that none put out as its own part."""
        return sorted((v for v in self.values.values() if v.read and v not in (x, self.y)), key=lambda v: v.seen)

    def _plain(self, x: Value, start: int) -> list[Sum] | None:
        """No norm stands on the stream: the most sums that lead from the first to the last."""
        best: dict[Mark, list[Sum]] = {x.mark: []}
        reached: list[tuple[Value, int]] = [(x, start)]
        for state in [*self._states(x), self.y]:
            end = self.block.end if state is self.y else state.seen
            paths = []
            for before, since in reached:
                total = self._sum(before, state, since, end, best[before.mark])
                if total is not None:
                    paths.append([*best[before.mark], total])
                    if state is not self.y:
                        break  # the first that explains it has the fewest terms behind it
            if paths:
                best[state.mark] = max(paths, key=len)
                reached.insert(0, (state, state.seen))
        return best.get(self.y.mark) or None

    def _normed(self, x: Value, start: int) -> list[Sum] | None:
        """Norms stand on the stream."""
        sums: list[Sum] = []
        before = x
        for norm in sorted(self.norms, key=lambda call: call.start):
            assert norm.entered is not None
            after = self.values.get(norm.entered.mark)
            following = self.values.get(norm.returned.mark)
            if after is None or following is None or norm.start < start:
                continue
            total = self._sum(before, after, start, norm.start, sums)
            if total is None:
                continue
            sums.append(replace(total, norm=norm))
            before, start = following, norm.end
        if sums and before.mark != self.y.mark and self.search_level:
            last = self._sum(before, self.y, start, self.block.end, sums)
            return None if last is None else [*sums, last]
        return sums if sums and before.mark == self.y.mark else None

    def _sum(self, before: Value, after: Value, start: int, end: int, earlier: Sequence[Sum]) -> Sum | None:
        """The sum that makes one stream of another; None where there is none."""
        known = [before, after]
        terms = self.explain(after.x - before.x, start, end, known)
        if terms is None and self.search_level:
            used = [term.value for each in earlier for term in each.terms]
            streams = [value for each in earlier for value in (each.before, each.after)]
            terms = self.explain(after.x - before.x, self.block.start, end, [*known, *used, *streams])
            late = [] if terms is None else [term for term in terms if term.value.made[0][0].end <= start]
            if terms and len(late) < len(terms):
                return Sum(before, after, (*(t for t in terms if t not in late), *late), start, end)
            found = self._affine(before, after, start, end)
            return found or (self._without_residual(before, after, start, end) if self.search_level > 1 else None)
        return None if terms is None else Sum(before, after, terms, start, end)

    def _affine(self, before: Value, after: Value, start: int, end: int) -> Sum | None:
        """The same, where the stream itself is multiplied, too, or parameters are."""
        width = self.width
        x, y = before.x.view(-1, width), after.x.view(-1, width)
        for value in self._candidates(start, end, [before, after]):
            v = value.x.view(-1, width)
            fitted = fit(x, v, y, self.close)
            on_stream, on_added = named(fitted, self.block.module) if fitted else (None, None)
            if on_stream is None or on_added is None:
                continue
            block = self.block.module
            with torch.no_grad():
                left = transformed(on_stream, x, block) + transformed(on_added, v, block) - y
            if bool((left.abs() <= self.close * y.abs().max()).all()):
                sum_module = next((call for call, _ in after.made if call.reads(value.mark)), None)
                return Sum(before, after, (Addend(value, on_added),), start, end, None, on_stream, sum_module)
        return None

    def _without_residual(self, before: Value, after: Value, start: int, end: int) -> Sum | None:
        """The same, where the stream before has no part in it."""
        terms = self.explain(after.x, start, end, [before, after])
        return None if terms is None else Sum(before, after, terms, start, end, residual_transform=times(0.0))

    def _candidates(self, start: int, end: int, known: Sequence[Value]) -> list[Value]:
        """What modules put out between two times, but for what is known to be a stream."""
        return [v for v in self.outputs if start < v.made[0][0].end <= end and v not in known]

    def explain(
        self, difference: Tensor, start: int, end: int, known: Sequence[Value] = ()
    ) -> tuple[Addend, ...] | None:
        """What modules put out between two times whose sum, each with a factor, is a difference of streams."""
        square = float(difference @ difference)
        candidates = self._candidates(start, end, known)
        if square == 0 or not candidates:
            return None
        matrix = torch.stack([v.x for v in candidates])
        gram, dots = matrix @ matrix.T, matrix @ difference
        largest = max((float(v.x @ v.x) for v in known[:2]), default=0.0)
        bound = self.close**2 * max(square, 1e-30) + self.rounding**2 * largest

        def left(weights: dict[int, float]) -> float:
            """The square of what is left of the difference."""
            rest = difference - torch.stack([candidates[i].x * w for i, w in weights.items()]).sum(0)
            return float(rest @ rest)

        def terms(weights: dict[int, float]) -> tuple[Addend, ...]:
            made = sorted(weights, key=lambda i: candidates[i].made[0][0].end)
            return tuple(self._scaled(candidates[i], _number(weights[i], self.block.module)) for i in made)

        rough = 1e-6 * square + bound  # a first look, by sums of squares that lose digits
        for weights in _fits(square, dots.tolist(), gram.tolist(), rough):
            if left(weights) <= bound:
                return terms({i: rounded(weight) for i, weight in weights.items()})
        return self._with_parameter(difference, candidates)

    def _scaled(self, value: Value, transform: Chain) -> Addend:
        """A term, or what it is made of by a parameter of each column (LayerScale), or by a constant."""
        call, y = value.made[0][0], value.x.view(-1, self.width)
        for before in self._candidates(call.start, call.end - 1, [self.x, self.y]) if not call.is_leaf else ():
            factor = factor_of(value.x, before.x)
            # A module that multiplies what its last layer makes (Falcon-H1's MLP).
            if before.made[0][0].is_linear and agree(factor * before.x, value.x, each=True):
                number = _number(rounded(factor), self.block.module)
                learned = any(p.numel() == 1 for p in call.module.parameters())
                if any(link.weight for link in number) or not learned:
                    return Addend(before, (*number, *transform))
        if not call.is_leaf or any(p.ndim > 1 for p in call.module.parameters()):
            return Addend(value, transform)
        for before in self._candidates(self.block.start, call.start, [self.x, self.y]):
            x = before.x.view(-1, self.width)
            weight = (x * y).sum(0) / (x * x).sum(0).clamp_min(1e-30)
            if agree(weight * x, y, each=True) and (name := parameter_of(self.block.module, weight, FITTED)):
                return Addend(before, (Affine(weight=name), *transform))
        return Addend(value, transform)

    def _with_parameter(self, difference: Tensor, candidates: Sequence[Value]) -> tuple[Addend, ...] | None:
        """One value, and a parameter of the block that is added to it at every position."""
        close = self.close * float(difference.abs().max())
        for value in candidates:
            rows = (difference - value.x).view(-1, self.width)
            if bool(((rows - rows[0]).abs() <= close).all()):
                name = parameter_of(self.block.module, rows.mean(0), close)
                if name is not None:
                    return (Addend(value, (Affine(plus=name),)),)
        return None


def _fits(
    square: float, dots: Sequence[float], gram: Sequence[Sequence[float]], rough: float
) -> Iterator[dict[int, float]]:
    """Which vectors may add up to another, with their factors: one, two, one with a factor, two with a factor each.

    Args:
        square: of the vector.
        dots: its products with each of the others.
        gram: their products.
        rough: how much of the square may be left.
    """
    d, g, squares = dots, gram, [row[i] for i, row in enumerate(gram)]
    each, pairs = range(len(d)), list(itertools.combinations(range(len(d)), 2))
    yield from ({i: 1.0} for i in each if abs(square - 2 * d[i] + squares[i]) <= rough)
    for i, j in pairs:
        if abs(square - 2 * (d[i] + d[j]) + squares[i] + squares[j] + 2 * g[i][j]) <= rough:
            yield {i: 1.0, j: 1.0}
    for i in each:
        factor = d[i] / squares[i]
        if abs(square - factor * d[i]) <= rough and abs(factor) > NEGLIGIBLE:
            yield {i: factor}
    for i, j in pairs:
        product, both = g[i][j], squares[i] * squares[j]
        det = both - product**2
        if det < _PARALLEL * both:
            continue
        u, v = (d[i] * squares[j] - d[j] * product) / det, (d[j] * squares[i] - d[i] * product) / det
        if min(abs(u), abs(v)) > NEGLIGIBLE and abs(square - u * d[i] - v * d[j]) <= rough:
            yield {i: u, j: v}


def fit(x: Tensor, v: Tensor, y: Tensor, close: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """For each column, the three numbers that make ``y = a * x + b * v + c``; None where there are none.

    Args:
        x, v, y: ``[row, d_model]``, of many rows.
        close: what numbers may differ by, relative to the largest.
    """
    mx, mv, my = x.mean(0), v.mean(0), y.mean(0)
    xc, vc, yc = x - mx, v - mv, y - my
    xx, vv, xv, xy, vy = (xc * xc).sum(0), (vc * vc).sum(0), (xc * vc).sum(0), (xc * yc).sum(0), (vc * yc).sum(0)
    det = xx * vv - xv * xv
    if not bool((det > _PARALLEL * xx * vv).all()):
        return None
    a, b = (xy * vv - vy * xv) / det, (vy * xx - xy * xv) / det
    c = my - a * mx - b * mv
    fits = bool(((a * x + b * v + c - y).abs() <= close * y.abs().max()).all())
    return (a, b, c) if fits and bool((a.abs() > NEGLIGIBLE).any() & (b.abs() > NEGLIGIBLE).any()) else None


def named(fitted: tuple[Tensor, Tensor, Tensor], block: nn.Module) -> tuple[Chain | None, Chain | None]:
    """What the numbers of `fit` are, of the stream and of what is added: constants, or parameters of the block."""
    a, b, c = fitted
    parameters = {
        name: p.detach().double().flatten().to(a.device)
        for name, p in block.named_parameters()
        if p.numel() in (1, a.numel()) and p.is_floating_point()
    }
    on_stream, on_added = _weight(a, parameters), _weight(b, parameters)
    if on_stream is None or on_added is None or _alike(c, torch.zeros_like(c), max(1.0, float(a.abs().max()))):
        return on_stream, on_added
    for name, p in parameters.items():
        plus = Affine(plus=name)
        if _alike(b * p, c):
            return on_stream, (plus, *on_added)
        if _alike(p.expand_as(c), c):
            return on_stream, (*on_added, plus)
    for (name, p), (other, q) in itertools.permutations(parameters.items(), 2):
        if _alike(a * p + b * q, c):
            return (Affine(plus=name), *on_stream), (Affine(plus=other), *on_added)
    return next((((Affine(plus=name), *on_stream), on_added) for name, p in parameters.items() if _alike(a * p, c)), (
        None, None,
    ))  # fmt: skip


def _number(factor: float, block: nn.Module) -> Chain:
    """A factor: a parameter of the block that is one number, which training changes, or a constant."""
    parameters = {name: p.detach().double().flatten().cpu() for name, p in block.named_parameters() if p.numel() == 1}
    return times(factor) if factor == 1 else _weight(torch.tensor([factor]).double(), parameters) or times(factor)


def _weight(seen: Tensor, parameters: Mapping[str, Tensor]) -> Chain | None:
    """What multiplies each column with these numbers."""
    for name, p in parameters.items():
        if _alike(seen, p.expand_as(seen)):
            return (Affine(weight=name),)
        if p.numel() == 1 and _alike(seen, p.tanh().expand_as(seen)):
            return (Affine(weight=name, squashed=True),)
    mean = seen.mean()
    return times(rounded(float(mean))) if _alike(seen, mean.expand_as(seen)) else None


def _alike(x: Tensor, y: Tensor, size: float | None = None) -> bool:
    """Whether numbers are the same, but for what a fit of a few rows leaves open."""
    size = float(y.abs().max()) if size is None else size
    return bool(((x - y).abs() <= FITTED * size).all())


# ----------------------------------------------------------------------------------------------------------------------
# What mixes several streams: each part reads a sum of them, and what it puts out goes to each with a weight.
# ----------------------------------------------------------------------------------------------------------------------


def with_streams(found: FoundStack, recording: Recording) -> FoundStack:
    """The same list of blocks, with the number of streams that it carries.

    Where they are the last axis but one of what enters a block, that is as long; where they are side by side in the
    last, a module that reads them says it.

    Args:
        found: the list of blocks.
        recording: of the run.
    """
    shape = found.stream.value.shape
    if len(shape) == 4:
        return replace(found, n_streams=shape[2])
    for block, output in zip(found.blocks[:1], found.outputs, strict=False):
        for n in _numbers(block, recording):
            if Mixed(block, output, recording, {}, n).find():
                return replace(found, n_streams=n)
    return found


def _numbers(block: ModuleCall, recording: Recording) -> Iterator[int]:
    """How many streams what enters a block may be."""
    assert block.entered is not None
    batch, pos, width = block.entered.value.shape
    for call in recording.between(block.start, block.end):
        if call.reads(block.entered.mark) and call.n_left > 1:
            shapes = [tuple(seen.value.shape) for seen in call.left]
            yield from (
                n for *at, n in shapes if at == [batch, pos] and 1 < n < width and (batch, pos, width // n) in shapes
            )


def first_of(found: FoundStack) -> ModuleCall:
    """The call of the first block; where it carries several streams, given one of them, if they are all the same."""
    block = found.blocks[0]
    if found.n_streams is None or block.entered is None:
        return block
    streams = _apart(block.entered.value, found.n_streams)
    one = streams[:, :, 0].contiguous()
    if not torch.equal(streams, one.unsqueeze(2).expand_as(streams)):
        return block
    return replace(block, entered=BorderTensor(None, block.entered.live, one, mark(one)))


def collapse(recording: Recording, found: FoundStack) -> tuple[BorderTensor, str | None]:
    """What is behind the last block: what it passes on; of several streams, the one that is made of them, and by what.

    Args:
        recording: of the run.
        found: the list of blocks.

    Returns:
        The stream, and the path of the module that makes one of several; None where there is none.
    """
    last, (batch, pos, *_) = found.outputs[-1], found.stream.value.shape
    for call in recording.calls if found.n_streams is not None else ():
        reads = call.start > found.blocks[-1].end and call.reads(last.mark)
        if reads and call.whole and call.whole.value.shape == (batch, pos, found.d_model):
            return call.whole, call.path
    return last, None


def _apart(x: Tensor, n_streams: int) -> Tensor:
    """``[batch, pos, stream, d_model]`` of that, or of streams side by side."""
    return x if x.ndim == 4 else x.unflatten(-1, (n_streams, -1))


class Mixed(Parts):
    """Those of a block that carries several streams: a `Value` of all has ``[batch, pos, stream, d_model]``.

    Args:
        block, output, recording, norms: as for `Sums`.
        n_streams: how many.
    """

    def __init__(
        self, block: ModuleCall, output: BorderTensor, recording: Recording, norms: Norms, n_streams: int
    ) -> None:
        assert block.entered is not None
        super().__init__(block, recording, norms)
        self.n, whole = n_streams, block.entered.value
        one = replace(block, entered=replace(block.entered, value=_apart(whole, n_streams)[:, :, 0]))
        self.values = values_in(one, recording)  # of the shape of one stream
        self.values.pop(block.entered.mark, None)
        self.x = self._state(block.entered, block.start)
        self.y = self._state(output, block.end)
        self.states = self._states(whole)

    def _state(self, seen: BorderTensor, time: int) -> Value:
        return Value(_apart(seen.value, self.n).double(), seen.mark, seen=time)

    def _states(self, whole: Tensor) -> list[Value]:
        """What may be the streams between two steps: what a module is given; and what leaves the block."""
        found = {self.x.mark: self.x}
        for call in sorted(self.inside, key=lambda call: call.start):
            if call.entered and call.entered.value.shape == whole.shape:
                found.setdefault(call.entered.mark, self._state(call.entered, call.start))
        found.setdefault(self.y.mark, self.y)
        return [state for state in found.values() if state is not self.x]

    def find(self) -> bool:
        """Finds them in order."""
        now, start = self.x, self.block.start
        while now.mark != self.y.mark:
            total = self._next(now, start)
            if total is None:
                return False
            self.sums.append(total[0])
            now, start = total[1], total[1].seen
        return bool(self.sums)

    def _next(self, now: Value, start: int) -> tuple[Sum, Value] | None:
        """The next sum from some streams on, and the streams that it makes."""
        for call in self.inside:
            if call.reads(now.mark) and call.start >= start and call.n_left > 1:
                mix = self._mix(call)
                for state in self.states if mix else ():
                    if mix and state.seen > call.end and (value := self._written(now, state, call, mix)):
                        before, ends = self.values[call.element(mix.read).mark], replace(state, x=state.x.flatten())
                        return Sum(before, ends, (Addend(value),), call.end, state.seen, mix=mix), state
        return None

    def _mix(self, call: ModuleCall) -> Mix | None:
        """What a module that is given the streams makes of them: what a part reads, and weights."""
        batch, pos, n, width = self.x.x.shape
        shapes: dict[tuple[int, ...], MixElement] = {
            (batch, pos, width): "read", (batch, pos, n): "write", (batch, pos, n, n): "keep",
        }  # fmt: skip
        last = {tuple(seen.value.shape): seen.key for seen in call.left}
        names = {key: shapes[shape] for shape, key in last.items() if shape in shapes and key is not None}
        if not {"read", "write"} <= {*names.values()}:
            return None
        return Mix(call.path, tuple(names.get(i, "") for i in range(max(names) + 1)))

    def _written(self, now: Value, state: Value, call: ModuleCall, mix: Mix) -> Value | None:
        """What a part puts out that makes some streams of others; None where nothing does."""
        write, keep = (None if i is None else call.element(i).value.double() for i in (mix.write, mix.keep))
        for value in self.values.values():
            if write is not None and value.made and call.end < value.made[0][0].end <= state.seen:
                total = mix.of(now.x, value.x.view(*now.x.shape[:2], -1), write, keep)
                if agree(total, state.x, call.element(mix.write).value):
                    return value
        return None
