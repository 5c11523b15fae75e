"""Which module makes what is added to the stream, what it reads, and what of the block belongs to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adapters.automatic.norms import relative
from adapters.block import Mix
from adapters.inputs import argument_names
from adapters.mixers import axes_of
from adapters.norms import OPAQUE_NORM, Norm, NormKind
from adapters.observe.gradients import gradient_of
from adapters.observe.observe import BorderTensor, Mark, ModuleCall, NotFound, Recording, Softmax, elements_of, tightest
from adapters.observe.recognised import agree, tolerance
from adapters.views import Args, Chain, Kwargs

#: The calls of a block that are norms, with what they compute.
Norms = Mapping[ModuleCall, NormKind]


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
    made: list[tuple[ModuleCall, BorderTensor]] = field(default_factory=list)
    read: list[ModuleCall] = field(default_factory=list)
    seen: int = 0


@dataclass(frozen=True, eq=False)
class Addend:
    """What is added to the stream: a value, and what it goes through before."""

    value: Value
    transform: Chain = ()


@dataclass(frozen=True, eq=False)
class Sum:
    """One sum on the stream.

    Attributes:
        before: the stream that it is made from.
        after: the stream that it makes.
        terms: what is added, in the order of the computation; what was made before `start`, last.
        norm: the norm on the stream behind it: its call. The next sum is made from what that puts out.
        start, end: the times between which its parts run.
        residual_transform: what happens to the stream before the terms are added.
        sum_module: the module that puts it out, where there is one.
        mix: what stands between several streams and the part, with its path from the model; `before` is then what the
            part reads.
    """

    before: Value
    after: Value
    terms: tuple[Addend, ...]
    start: int
    end: int
    norm: ModuleCall | None = None
    residual_transform: Chain = ()
    sum_module: ModuleCall | None = None
    mix: Mix | None = None


@dataclass(eq=False)
class FoundPart:
    """What makes one term of a sum.

    Attributes:
        owner: the tightest call around what it computes; None where that is the block itself.
        out: the call whose output is added (or, with `post`, enters the norm).
        added: that output.
        producer: the innermost call that puts it out.
        pre, post: the norms that it reads and writes through, with their paths from the model.
        calls: of modules without parts of their own that multiply with a matrix, in order, without `producer`.
        inside: all calls that ran inside of the owner.
        softmaxes: that ran inside.
        reads: the stream that it reads.
        start: the time from which it runs.
        reader: the first module that is given what it reads.
        entry: the norm that reads the stream for it, where something stands between that and its owner.
        missing: what could not be found out, by what it is about.
    """

    owner: ModuleCall | None
    out: ModuleCall
    added: BorderTensor
    producer: ModuleCall
    pre: Norm | None
    post: Norm | None
    calls: list[ModuleCall]
    softmaxes: list[Softmax]
    reads: Value
    start: int
    missing: dict[str, str] = field(default_factory=dict)
    inside: list[ModuleCall] = field(default_factory=list)
    reader: ModuleCall | None = None
    entry: ModuleCall | None = None


def values_in(block: ModuleCall, recording: Recording) -> dict[Mark, Value]:
    """All tensors with as many numbers as the stream, and its width, that pass a module's border inside a block."""
    assert block.entered is not None
    numel, width = block.entered.value.numel(), block.entered.value.shape[-1]
    found: dict[Mark, Value] = {}

    def at(seen: BorderTensor, time: int) -> Value | None:
        if seen.value.numel() != numel or seen.value.shape[-1] != width:
            return None
        return found.setdefault(seen.mark, Value(seen.value.double().flatten(), seen.mark, seen=time))

    entry = at(block.entered, block.start)
    assert entry is not None
    events: list[tuple[int, ModuleCall, BorderTensor]] = []
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


class Parts:
    """What a block adds to the stream, sum by sum, and the parts that make it. How sums are found, a subclass says.

    Args:
        block: its call.
        recording: the run.
        norms: its norms.

    Attributes:
        values: what passes borders inside of it with the shape of the stream, by mark.
        sums: its sums.
        norm: the call of the norm on the stream before the first.
    """

    values: dict[Mark, Value]
    norm: ModuleCall | None = None

    def __init__(self, block: ModuleCall, recording: Recording, norms: Norms) -> None:
        self.block, self.recording, self.norms = block, recording, norms
        self.inside = recording.between(block.start, block.end)
        self.sums: list[Sum] = []

    def find(self) -> bool:
        """Whether its sums explain what leaves the block."""
        raise NotImplementedError

    def of_sum(self, total: Sum) -> list[FoundPart]:
        """The parts of a sum, in its terms' order."""
        return [self._part(term, *self._read_in(term, total)) for term in total.terms]

    def _read_in(self, term: Addend, total: Sum) -> tuple[Sum, int]:
        """The sum in whose time a term is made, and the time from which on its part runs."""
        made = term.value.made[0][0]
        within = next((each for each in self.sums if each.start < made.end <= each.end), total)
        terms = [each.value.made[0][0].end for other in self.sums for each in other.terms]
        return within, max((end for end in terms if within.start < end < made.end), default=within.start)

    def reads(self, term: Addend, total: Sum) -> int | None:
        """Which of the block's streams the part of a term reads, where it is made before the sum begins."""
        within = self._read_in(term, total)[0]
        return None if within is total else self.sums.index(within)

    def _part(self, term: Addend, total: Sum, start: int) -> FoundPart:
        producer = term.value.made[0][0]
        out = self._outermost(term.value, total.end)
        post = None
        if producer in self.norms and producer.entered is not None:
            before = self.values.get(producer.entered.mark)
            if before is not None and before is not total.before:
                post = Norm(producer.path, self.norms[producer])
                if before.made:
                    out = self._outermost(before, producer.start)
                    producer = before.made[0][0]
                elif producer.entered is not None:  # a sum that no module puts out: it stands where the norm reads it
                    out = producer, producer.entered
        linear = self._matrices(start, producer) or self._makers(total.start, producer)
        softmaxes = self.recording.softmaxes_between(start, producer.end)
        owner = self._owner(producer, linear, softmaxes)
        part = FoundPart(owner, *out, producer, None, post, linear, softmaxes, total.before, start)
        part.inside = [call for call in self.inside if owner is not None and owner.holds(call) and call is not owner]
        self._find_reading(part, total)
        return part

    def _outermost(self, value: Value, end: int) -> tuple[ModuleCall, BorderTensor]:
        """The last module to put out a value before it is added: what it puts out in training too, dropout included."""
        made = [each for each in value.made if each[0].end <= end]
        once = [each for each in made if len(self.recording.of(each[0].path)) == 1]
        return max(once or made[:1], key=lambda each: each[0].end)

    def _matrices(self, start: int, producer: ModuleCall) -> list[ModuleCall]:
        """The calls that multiply with a matrix, from a time on until the producer ends."""
        return [
            call for call in self.inside if start <= call.start and call.end <= producer.end and call.is_linear
            and call is not producer and not any(norm.holds(call) for norm in self.norms)
            and not self._is_constant(call)
        ]  # fmt: skip

    def _is_constant(self, call: ModuleCall) -> bool:
        """Whether a layer is given one row for all positions, which is not of the stream."""
        rows = (self.block.entered.value if self.block.entered else self.recording.calls[0].returned.value).shape[:-1]
        return call.entered is not None and math.prod(call.entered.value.shape[:-1]) == 1 < math.prod(rows)

    def _makers(self, start: int, producer: ModuleCall) -> list[ModuleCall]:
        """Those that ran with another part and have a part in what the producer is given (PaLM's one projection)."""
        if producer.entered is None or not producer.entered.live.requires_grad:
            return []
        total = producer.entered.live.pow(2).sum()
        return [
            call for call in self._matrices(start, producer)
            if (reached := gradient_of(total, call.returned.live)) is not None and bool(reached.any())
        ]  # fmt: skip

    def _owner(
        self, producer: ModuleCall, calls: Sequence[ModuleCall], softmaxes: Sequence[Softmax]
    ) -> ModuleCall | None:
        """The tightest call inside the block around all of a part."""
        around = [
            call for call in self.inside
            if call.holds(producer)
            and all(call.holds(each) for each in calls)
            and all(call.start < each.time < call.end for each in softmaxes)
            and (call is not producer or not (call.is_leaf and call.is_linear))
        ]  # fmt: skip
        return tightest(around)

    def _find_reading(self, part: FoundPart, total: Sum) -> None:
        """The norm that the part reads through."""
        readers = [part.owner, *part.calls, part.producer] if part.owner else [*part.calls[:1], part.producer]
        given = {call.entered.mark for call in readers if call and call.entered}
        inner = {call.entered.mark for call in self.inside if part.owner and part.owner.holds(call) and call.entered}
        stream = total.before
        early = [call for call in self.inside if part.start < call.start and call.end <= part.producer.end]
        reads = [call for call in early if call.reads(stream.mark)]
        part.reader = next((call for call in reads if call not in self.norms), None)
        for call, kind in self.norms.items():
            if not call.reads(stream.mark) or call.end > part.producer.end:
                continue
            if not part.owner and part.reader and call.end <= part.start:
                continue  # the norm of another part, while this one reads the stream itself (Inkling 2)
            if not part.owner:  # what it norms is given to the first module that is given it
                read = [c for c in early if c.reads(call.returned.mark) and c.start > call.end]
                part.reader = read[0] if read else part.reader
                given |= {call.returned.mark} if read else set()
            if call.returned.mark in given | inner:
                part.pre = Norm(call.path, kind)
                return
        if stream.mark in given or (part.reader and not part.owner):
            return
        # Something stands between that is no norm that we know.
        for call in self.inside:
            between = call.reads(stream.mark) and call.end <= part.producer.end
            if between and call is not part.owner and call.is_leaf and any(seen.mark in given for seen in call.left):
                part.pre = Norm(call.path, OPAQUE_NORM)
                part.missing["pre"] = f"{call.path} is a {type(call.module).__name__}, which is no norm that is known"
                return
        scaled = next((norm for norm in self.norms if self._is_scaled(norm, stream, part)), None)
        if scaled is not None:
            part.entry = scaled
            part.missing["pre"] = (
                f"what {scaled.path} makes is multiplied by what is not of the stream before it is read"
            )
            return
        part.missing["entry"] = "what it reads of the stream is not what enters any of its modules"

    @staticmethod
    def _is_scaled(norm: ModuleCall, stream: Value, part: FoundPart) -> bool:
        """Whether a norm of the stream enters a part times one row for all positions (Voxtral Realtime's delay)."""
        entered = part.owner.entered if part.owner else None
        if entered is None or not norm.reads(stream.mark) or entered.value.shape != norm.returned.value.shape:
            return False
        x, y = (each.value.double().flatten(0, -2) for each in (norm.returned, entered))
        return agree((x * y).sum(0) / (x * x).sum(0).clamp_min(1e-30) * x, y, each=True)


def mixes_positions(
    part: FoundPart, positions: int, rerun: Callable[[ModuleCall, ModuleCall], Tensor | None]
) -> bool | None:
    """Whether what a part puts out at a position depends on its input at others; None where it cannot be told.

    Softmaxes aside: their patterns are constants of the run.

    Args:
        part: the part.
        positions: the axis of positions.
        rerun: runs the model with another input of a module at all positions but the last, and gives what a module puts
            out: where the model writes over what a gradient would be taken from.

    Raises:
        NotFound: no gradient can be taken, which would tell, it computes no softmax, and no other run can be made.
    """
    entry = part.owner.entered if part.owner else part.calls[0].entered if part.calls else None
    made = part.added.live
    if entry is None or made.ndim != 3:
        return None
    last = made.shape[positions] - 1
    try:
        gradient = gradient_of(made.select(positions, last).select(0, 0).sum(), entry.live)
    except NotFound as no_gradient:
        if part.softmaxes:
            return None
        again = rerun(part.owner, part.out) if part.owner else None
        if again is not None and again.shape == made.shape:
            before = part.added.value.select(positions, last)
            changed = (again.select(positions, last) - before).abs()
            return bool((changed > tolerance(before) * before.abs().max()).any())
        path = part.owner.path if part.owner else part.producer.path
        raise NotFound(f"whether {path} mixes positions is not known: {no_gradient}") from None
    if gradient is None or gradient.ndim != 3:
        return None
    return bool((gradient.select(1 - positions, 0)[:last] != 0).any())


def rerun(
    model: nn.Module, inputs: Mapping[str, Tensor], positions: int, entry: ModuleCall, left: ModuleCall
) -> Tensor | None:
    """What a module returns where another one is given something else at all positions but the last.

    Args:
        model, inputs: as for `record`.
        positions: the axis of positions.
        entry: a call of the module whose first argument is changed.
        left: a call of the module that is looked at.

    Returns:
        The tensor that it returns first; None where the two do not run once each.
    """
    seen: list[Tensor] = []
    name = next(iter(argument_names(entry.module)), "")

    def change(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        x = args[0] if args else kwargs[name]
        n = x.shape[positions]
        y = torch.cat([x.narrow(positions, 0, n - 1) * 1.5 + 0.1, x.narrow(positions, n - 1, 1)], dim=positions)
        return ((y, *args[1:]), kwargs) if args else (args, {**kwargs, name: y})

    def look(module: nn.Module, args: Args, output: object) -> None:
        seen.extend(x for x in (output, *elements_of(output)) if isinstance(x, Tensor) and x.is_floating_point())

    if entry.entered is None or entry.entered.value.ndim != 3 or "@" in entry.path + left.path:
        return None
    changed = entry.module.register_forward_pre_hook(change, with_kwargs=True)
    with torch.no_grad(), changed, left.module.register_forward_hook(look):
        model(**inputs)
    return seen[0] if seen else None


def modules_of(owner: ModuleCall, recording: Recording, norms: Norms) -> tuple[tuple[str | Norm, str], ...]:
    """The modules in a mixer that run once, norms among them, with the axes of what they return."""
    found: dict[str, tuple[str | Norm, str]] = {}
    for call in recording.calls:
        once = owner.holds(call) and call is not owner and len(recording.of(call.path)) == 1
        if once and not isinstance(call.module, nn.Dropout) and call.is_leaf and call.whole:
            path, shape, kind = relative(call.path, owner.path), call.whole.value.shape, norms.get(call)
            if len(shape) > 1:
                axes = axes_of(path.rpartition(".")[2], shape, recording.batch, recording.pos)
                if len(shape) == 2 and axes.startswith("row ") and _rows_of_heads(owner, call, recording):
                    axes = f"(batch pos {axes[6:]}_2) {axes[4:]}"
                found[path] = (Norm(path, kind) if kind and kind.name else path), axes
    direct = tuple(each for path, each in found.items() if "." not in path)
    names = {path.rpartition(".")[2] for path in found}
    return direct or (tuple(found.values()) if len(names) == len(found) else ())


def _rows_of_heads(owner: ModuleCall, call: ModuleCall, recording: Recording) -> bool:
    """Whether the rows that a module in a mixer returns are of each head of each position of each prompt, in turn.

    A later module in it reads them so, side by side.
    """
    assert call.whole is not None
    rows = call.whole.value
    if len(rows) % (recording.batch * recording.pos):
        return False
    heads = rows.view(recording.batch, recording.pos, -1)
    read = (each.entered for each in recording.calls if owner.holds(each) and each.start > call.start)
    return any(x is not None and x.value.shape == heads.shape and torch.equal(x.value, heads) for x in read)
