"""Infer the parts of a block: the modules that compute each term added to the stream, and their
inputs.
"""

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
from adapters.observe.observe import (
    BorderTensor,
    Mark,
    ModuleCall,
    NotFound,
    Recording,
    Softmax,
    elements_of,
    tightest,
)
from adapters.observe.recognised import agree, tolerance
from adapters.views import Args, Chain, Kwargs

#: The calls of a block that are norms, with what they compute.
Norms = Mapping[ModuleCall, NormKind]


@dataclass(eq=False)
class Value:
    """A tensor of the stream's shape inside a block, with all calls that output or read it.

    Attributes:
        x: its numbers, in rows, float64.
        mark: see `adapters.observe.observe.mark`.
        producers: the calls that output it, ordered by their end, with their outputs.
        readers: the calls whose input it is, ordered by their start.
        time: when it first appears.
    """

    x: Tensor
    mark: Mark
    producers: list[tuple[ModuleCall, BorderTensor]] = field(default_factory=list)
    readers: list[ModuleCall] = field(default_factory=list)
    time: int = 0

    @property
    def producer(self) -> ModuleCall:
        """Return the first call that outputs it."""
        return self.producers[0][0]


@dataclass(frozen=True, eq=False)
class Addend:
    """A term added to the stream: a value, and the transform applied to it."""

    value: Value
    transform: Chain = ()


@dataclass(frozen=True, eq=False)
class Sum:
    """A residual sum.

    Attributes:
        before: the stream before the sum.
        after: the stream after the sum.
        terms: the terms, in the order of computation; those computed before `start` come last.
        start, end: the times between which its parts run.
        norm: the call of a norm on the stream after the sum. The next sum starts from its output.
        residual_transform: the transform of the stream before the terms are added.
        sum_module: the module that outputs the sum, if any.
        mix: the mix between several streams and the part, with its path from the model; `before` is
            then the part's input.
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
    """Inferred structure of the part that computes one term of a sum.

    Attributes:
        owner: the innermost call around its computation; None if that is the block itself.
        out: the call whose output is added (or, with `post`, enters the norm).
        added: that output.
        producer: the innermost call that outputs it.
        pre, post: the norms that it reads and writes through, with their paths from the model.
        calls: the calls of linear layers, in order, without `producer`.
        inside: all calls inside the owner.
        softmaxes: the softmaxes inside it.
        reads: the stream that it reads.
        start: the time at which it starts.
        reader: the first module that reads the part's input.
        entry: the norm through which it reads the stream, if there is an operation between that
            norm and the owner.
        missing: reasons for missing facts, by subject.
    """

    owner: ModuleCall | None
    out: ModuleCall
    added: BorderTensor
    producer: ModuleCall
    calls: list[ModuleCall]
    softmaxes: list[Softmax]
    reads: Value
    start: int
    pre: Norm | None = None
    post: Norm | None = None
    missing: dict[str, str] = field(default_factory=dict)
    inside: list[ModuleCall] = field(default_factory=list)
    reader: ModuleCall | None = None
    entry: ModuleCall | None = None


def values_in(block: ModuleCall, recording: Recording) -> dict[Mark, Value]:
    """Return all tensors of the stream's size and width at module borders inside a block."""
    assert block.entered is not None
    stream = block.entered.value
    values: dict[Mark, Value] = {}
    for time, call, tensor in _borders(block, recording):
        x = tensor.value
        if x.numel() != stream.numel() or x.shape[-1] != stream.shape[-1]:
            continue
        if tensor.mark not in values:
            values[tensor.mark] = Value(x.double().flatten(), tensor.mark, time=time)
        value = values[tensor.mark]
        if time > call.start:
            value.producers.append((call, tensor))
        elif call is not block:
            value.readers.append(call)
    return values


def _borders(block: ModuleCall, recording: Recording) -> list[tuple[int, ModuleCall, BorderTensor]]:
    """Return the block's input, and the inputs and outputs of the calls inside it, in order."""
    borders: list[tuple[int, ModuleCall, BorderTensor]] = []
    for call in [block, *recording.between(block.start, block.end)]:
        if call.entered:
            borders.append((call.start, call, call.entered))
        if call is not block:
            borders += [(call.end, call, tensor) for tensor in call.outputs]
    return sorted(borders, key=lambda border: border[0])


class Parts:
    """Residual sums of a block, and the parts that compute their terms. A subclass defines the
    search for sums.

    Args:
        block: its call.
        recording: the run.
        norms: its norms.

    Attributes:
        values: the tensors of the stream's shape at borders inside it, by mark.
        sums: its sums.
        norm: the call of the norm on the stream before the first.
    """

    values: dict[Mark, Value]
    norm: ModuleCall | None = None

    def __init__(self, block: ModuleCall, recording: Recording, norms: Norms) -> None:
        self.block = block
        self.recording = recording
        self.norms = norms
        self.inside = recording.between(block.start, block.end)
        self.sums: list[Sum] = []

    def find(self) -> bool:
        """Find the sums, and tell whether they explain the block's output."""
        raise NotImplementedError

    def of_sum(self, total: Sum) -> list[FoundPart]:
        """Return the parts of a sum, in the order of its terms."""
        return [self._part(term, *self._read_in(term, total)) for term in total.terms]

    def _read_in(self, term: Addend, total: Sum) -> tuple[Sum, int]:
        """Return the sum during which a term is computed, and the time at which its part starts."""
        end = term.value.producer.end
        within = next((other for other in self.sums if other.start < end <= other.end), total)
        start = within.start
        for other in self.sums:
            for earlier in other.terms:
                if start < earlier.value.producer.end < end:
                    start = earlier.value.producer.end
        return within, start

    def reads(self, term: Addend, total: Sum) -> int | None:
        """Return the index of the block's stream that the part of a term reads, if the term is
        computed before its sum begins; otherwise None.
        """
        within = self._read_in(term, total)[0]
        if within is total:
            return None
        return self.sums.index(within)

    def _part(self, term: Addend, total: Sum, start: int) -> FoundPart:
        producer = term.value.producer
        post = None
        out = self._outermost(term.value, total.end)
        normed = producer.entered if producer in self.norms else None
        if normed is not None:
            before = self.values.get(normed.mark)
            if before is not None and before is not total.before:
                post = Norm(producer.path, self.norms[producer])
                if before.producers:
                    out = self._outermost(before, producer.start)
                    producer = before.producer
                else:  # no module outputs the sum: use the norm's input
                    out = producer, normed
        linear = self._matrices(start, producer) or self._makers(total.start, producer)
        softmaxes = self.recording.softmaxes_between(start, producer.end)
        owner = self._owner(producer, linear, softmaxes)
        inside = []
        if owner is not None:
            inside = [call for call in self.inside if owner.holds(call) and call is not owner]
        part = FoundPart(
            owner=owner,
            out=out[0],
            added=out[1],
            producer=producer,
            post=post,
            calls=linear,
            softmaxes=softmaxes,
            reads=total.before,
            start=start,
            inside=inside,
        )
        self._find_reading(part)
        return part

    def _outermost(self, value: Value, end: int) -> tuple[ModuleCall, BorderTensor]:
        """Return the last module that outputs a value before it is added, so that dropout is
        included in training.
        """
        before = [producer for producer in value.producers if producer[0].end <= end]
        once = [out for out in before if len(self.recording.of(out[0].path)) == 1]
        return max(once or before[:1], key=lambda producer: producer[0].end)

    def _matrices(self, start: int, producer: ModuleCall) -> list[ModuleCall]:
        """Return the linear calls between a time and the producer's end."""
        matrices = []
        for call in self.inside:
            is_during = start <= call.start and call.end <= producer.end and call is not producer
            if not is_during:
                continue
            if not call.is_linear:
                continue
            if self._is_constant(call):
                continue
            if not any(norm.holds(call) for norm in self.norms):
                matrices.append(call)
        return matrices

    def _is_constant(self, call: ModuleCall) -> bool:
        """Tell whether a layer has a single input row for all positions, which is not part of the
        stream.
        """
        stream = self.block.entered_value
        if stream is None:
            stream = self.recording.calls[0].value
        x = call.entered_value
        if x is None:
            return False
        if math.prod(stream.shape[:-1]) == 1:
            return False
        return math.prod(x.shape[:-1]) == 1

    def _makers(self, start: int, producer: ModuleCall) -> list[ModuleCall]:
        """Return linear calls that ran as part of another part, but on which the producer's input
        depends (PaLM's single projection).
        """
        if producer.entered is None:
            return []
        if not producer.entered.live.requires_grad:
            return []
        total = producer.entered.live.pow(2).sum()
        makers = []
        for call in self._matrices(start, producer):
            gradient = gradient_of(total, call.returned.live)
            if gradient is not None and bool(gradient.any()):
                makers.append(call)
        return makers

    def _owner(
        self, producer: ModuleCall, calls: Sequence[ModuleCall], softmaxes: Sequence[Softmax]
    ) -> ModuleCall | None:
        """Return the innermost call inside the block that contains all of a part."""
        around = []
        for call in self.inside:
            if call is producer and call.is_linear:
                continue
            if not all(call.holds(inner) for inner in (producer, *calls)):
                continue
            if all(call.start < softmax.time < call.end for softmax in softmaxes):
                around.append(call)
        return tightest(around)

    def _find_reading(self, part: FoundPart) -> None:
        """Record the norm through which the part reads the stream."""
        mark = part.reads.mark
        inputs = self._inputs(part)
        early = [call for call in self.inside if call.end <= part.producer.end]
        before = [call for call in early if call.start > part.start]
        readers = (call for call in before if call.reads(mark) and call not in self.norms)
        part.reader = next(readers, None)
        for norm in self.norms:
            if not norm.reads(mark) or norm.end > part.producer.end:
                continue
            if part.owner is None:
                if part.reader and norm.end <= part.start:
                    # This is another part's norm; this part reads the stream directly (Inkling 2).
                    continue
                # The first reader of the norm's output is the part's reader.
                behind = [c for c in before if c.reads(norm.returned.mark) and c.start > norm.end]
                if behind:
                    part.reader = behind[0]
                    inputs.add(norm.returned.mark)
            if norm.returned.mark in inputs or self._is_read_inside(norm, part):
                part.pre = Norm(norm.path, self.norms[norm])
                return
        if mark not in inputs and (part.owner or not part.reader):
            self._explain_reading(part, inputs, early)

    @staticmethod
    def _inputs(part: FoundPart) -> set[Mark]:
        """Return the marks of the tensors by which a part may read the stream."""
        if part.owner:
            calls = [part.owner, *part.calls, part.producer]
        else:
            calls = [*part.calls[:1], part.producer]
        return {call.entered.mark for call in calls if call.entered}

    @staticmethod
    def _is_read_inside(norm: ModuleCall, part: FoundPart) -> bool:
        """Tell whether a module inside a part's owner reads the output of a norm."""
        if part.owner is None:
            return False
        inside = [part.owner, *part.inside]
        return any(call.reads(norm.returned.mark) for call in inside)

    def _explain_reading(
        self, part: FoundPart, inputs: set[Mark], early: Sequence[ModuleCall]
    ) -> None:
        """Record the unknown operation between the stream and the part."""
        for call in early:
            if call is part.owner:
                continue
            if not call.is_leaf:
                continue
            if not call.reads(part.reads.mark):
                continue
            if any(output.mark in inputs for output in call.outputs):
                part.pre = Norm(call.path, OPAQUE_NORM)
                kind = type(call.module).__name__
                part.missing["pre"] = f"{call.path} is a {kind}, which is no norm that is known"
                return
        for norm in self.norms:
            if self._is_scaled(norm, part):
                part.entry = norm
                part.missing["pre"] = (
                    f"what {norm.path} makes is multiplied by what is not of the stream before it"
                    " is read"
                )
                return
        part.missing["entry"] = "what it reads of the stream is not what enters any of its modules"

    @staticmethod
    def _is_scaled(norm: ModuleCall, part: FoundPart) -> bool:
        """Tell whether the input of a part is a norm of the stream times one row for all positions
        (Voxtral Realtime's delay).
        """
        entered = part.owner.entered_value if part.owner else None
        if entered is None:
            return False
        if not norm.reads(part.reads.mark):
            return False
        if entered.shape != norm.value.shape:
            return False
        x = norm.value.double().flatten(0, -2)
        y = entered.double().flatten(0, -2)
        row = (x * y).sum(0) / (x * x).sum(0).clamp_min(1e-30)
        return agree(row * x, y, each=True)


def mixes_positions(
    part: FoundPart, positions: int, rerun: Callable[[ModuleCall, ModuleCall], Tensor | None]
) -> bool | None:
    """Tell whether a part's output at a position depends on its input at others; None if unknown.

    Softmaxes are excluded: their patterns are constants of the run.

    Args:
        part: the part.
        positions: the axis of positions.
        rerun: runs the model with a module's input replaced at all positions but the last, and
            returns a module's output. It is used if the model overwrites tensors that a gradient
            needs.

    Raises:
        NotFound: no gradient can be taken, the part computes no softmax, and another run is not
            possible.
    """
    first = part.owner or next(iter(part.calls), None)
    entry = first.entered if first else None
    added = part.added.live
    if entry is None or added.ndim != 3:
        return None
    last = added.shape[positions] - 1
    last_row = added.select(positions, last)
    try:
        gradient = gradient_of(last_row.select(0, 0).sum(), entry.live)
    except NotFound as no_gradient:
        if part.softmaxes:
            return None
        again = rerun(part.owner, part.out) if part.owner else None
        if again is not None and again.shape == added.shape:
            before = part.added.value.select(positions, last)
            changed = (again.select(positions, last) - before).abs()
            return bool((changed > tolerance(before) * before.abs().max()).any())
        path = (part.owner or part.producer).path
        raise NotFound(f"whether {path} mixes positions is not known: {no_gradient}") from None
    if gradient is None or gradient.ndim != 3:
        return None
    return bool(gradient.select(1 - positions, 0)[:last].any())


def rerun(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    positions: int,
    entry: ModuleCall,
    out: ModuleCall,
) -> Tensor | None:
    """Run the model with one module's input replaced at all positions but the last, and return a
    module's output.

    Args:
        model, inputs: as for `record`.
        positions: the axis of positions.
        entry: a call of the module whose first argument is changed.
        out: a call of the module whose output is returned.

    Returns:
        The first floating-point tensor of its output; None unless both modules run exactly once.
    """
    if entry.entered is None:
        return None
    if entry.entered.value.ndim != 3:
        return None
    if "@" in entry.path + out.path:
        return None
    outputs: list[Tensor] = []

    def change(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        name = next(iter(argument_names(module)), "")
        x = args[0] if args else kwargs[name]
        last = x.shape[positions] - 1
        earlier = x.narrow(positions, 0, last) * 1.5 + 0.1
        y = torch.cat([earlier, x.narrow(positions, last, 1)], dim=positions)
        if args:
            return ((y, *args[1:]), kwargs)
        return (args, {**kwargs, name: y})

    def look(module: nn.Module, args: Args, output: object) -> None:
        for x in (output, *elements_of(output)):
            if isinstance(x, Tensor) and x.is_floating_point():
                outputs.append(x)

    changed = entry.module.register_forward_pre_hook(change, with_kwargs=True)
    with torch.no_grad(), changed, out.module.register_forward_hook(look):
        model(**inputs)
    return outputs[0] if outputs else None


def modules_of(
    owner: ModuleCall, recording: Recording, norms: Norms
) -> tuple[tuple[str | Norm, str], ...]:
    """Return the modules of a mixer that run once, norms included, with the axes of
    their outputs.
    """
    modules: dict[str, tuple[str | Norm, str]] = {}
    for call in recording.inside(owner):
        output = call.only_output
        if call is owner or output is None or not call.is_leaf or output.value.ndim < 2:
            continue
        if isinstance(call.module, nn.Dropout):
            continue
        if len(recording.of(call.path)) > 1:
            continue
        path = relative(call.path, owner.path)
        kind = norms.get(call)
        module = Norm(path, kind) if kind and kind.name else path
        modules[path] = module, _output_axes(owner, call, path, recording)
    direct = tuple(module for path, module in modules.items() if "." not in path)
    if direct:
        return direct
    names = {path.rpartition(".")[2] for path in modules}
    if len(names) == len(modules):
        return tuple(modules.values())
    return ()


def _output_axes(owner: ModuleCall, call: ModuleCall, path: str, recording: Recording) -> str:
    """Return the axes of the output of a mixer's module."""
    shape = call.value.shape
    axes = axes_of(path.rpartition(".")[2], shape, recording.batch, recording.pos)
    of_heads = len(shape) == 2 and axes.startswith("row ")
    if of_heads and _rows_of_heads(owner, call, recording):
        return f"(batch pos {axes[6:]}_2) {axes[4:]}"
    return axes


def _rows_of_heads(owner: ModuleCall, call: ModuleCall, recording: Recording) -> bool:
    """Tell whether the rows that a module of a mixer returns are ordered by prompt, position and
    head.

    A later module of the mixer then reads the heads concatenated.
    """
    rows = call.value
    if len(rows) % (recording.batch * recording.pos):
        return False
    heads = rows.view(recording.batch, recording.pos, -1)
    for reader in recording.inside(owner):
        x = reader.entered_value
        if reader.start > call.start and x is not None and torch.equal(x, heads):
            return True
    return False
