"""What mixes several streams: each part reads a sum of them, and what it puts out goes to each with a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adapters.automatic.blocks import FoundStack
from adapters.automatic.stream import FoundMix, Sum, Term, Value, values_in
from adapters.observe.calls import BorderTensor, Mark, ModuleCall, Recording, mark
from adapters.observe.tolerance import agree


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
            if Mixed(block, output, recording, n).find():
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


def collapse(recording: Recording, found: FoundStack) -> BorderTensor:
    """What is behind the last block: what it passes on; of several streams, the one that is made of them."""
    call = _collapse(recording, found)
    return found.outputs[-1] if call is None else call.left[0]


def collapse_path(recording: Recording, found: FoundStack) -> str | None:
    """The module that makes one stream of the last ones; None where there is none."""
    call = _collapse(recording, found)
    return None if call is None else call.path


def _collapse(recording: Recording, found: FoundStack) -> ModuleCall | None:
    last, (batch, pos, *_) = found.outputs[-1], found.stream.value.shape
    for call in recording.calls if found.n_streams is not None else ():
        reads = call.start > found.blocks[-1].end and call.reads(last.mark)
        if reads and call.whole and call.whole.value.shape == (batch, pos, found.d_model):
            return call
    return None


def _apart(x: Tensor, n_streams: int) -> Tensor:
    """``[batch, pos, stream, d_model]`` of that, or of streams side by side."""
    return x if x.ndim == 4 else x.unflatten(-1, (n_streams, -1))


@dataclass(frozen=True, eq=False)
class _State:
    """The streams at one time: their numbers, and when they were seen first."""

    x: Tensor
    mark: Mark
    seen: int


class Mixed:
    """Finds the sums of a block that carries several streams.

    Args:
        block: its call.
        output: what it passes on.
        recording: the run.
        n_streams: how many.
    """

    def __init__(self, block: ModuleCall, output: BorderTensor, recording: Recording, n_streams: int) -> None:
        assert block.entered is not None
        self.block, self.recording, self.n = block, recording, n_streams
        whole = block.entered.value
        self.inside = recording.between(block.start, block.end)
        one = replace(block, entered=replace(block.entered, value=_apart(whole, n_streams)[:, :, 0]))
        #: What passes borders inside with the shape of one stream.
        self.values = values_in(one, recording, one.entered.value.shape if one.entered else whole.shape)
        self.values.pop(block.entered.mark, None)
        self.x = self._state(block.entered, block.start)
        self.y = self._state(output, block.end)
        self.states = self._states(whole)

    def _state(self, seen: BorderTensor, time: int) -> _State:
        return _State(_apart(seen.value, self.n).double(), seen.mark, time)

    def _states(self, whole: Tensor) -> list[_State]:
        """What may be the streams between two steps: what a module is given; and what leaves the block."""
        found = {self.x.mark: self.x}
        for call in sorted(self.inside, key=lambda call: call.start):
            if call.entered and call.entered.value.shape == whole.shape:
                found.setdefault(call.entered.mark, self._state(call.entered, call.start))
        found.setdefault(self.y.mark, self.y)
        return [state for state in found.values() if state is not self.x]

    def find(self) -> list[Sum] | None:
        """The sums, in order; None where they do not explain what leaves the block."""
        sums: list[Sum] = []
        now, start = self.x, self.block.start
        while now.mark != self.y.mark:
            total = self._next(now, start)
            if total is None:
                return None
            sums.append(total[0])
            now, start = total[1], total[1].seen
        return sums or None

    def _next(self, now: _State, start: int) -> tuple[Sum, _State] | None:
        """The next sum from some streams on, and the streams that it makes."""
        for call in self.inside:
            if call.reads(now.mark) and call.start >= start and call.n_left > 1:
                mix = self._mix(call)
                for state in self.states if mix else ():
                    if mix and state.seen > call.end and (value := self._written(now, state, mix)):
                        before = self.values[call.element(mix.read).mark]
                        ends = Value(state.x.flatten(), state.mark, seen=state.seen)
                        return Sum(before, ends, (Term(value),), call.end, state.seen, mix=mix), state
        return None

    def _mix(self, call: ModuleCall) -> FoundMix | None:
        """What a module that is given the streams makes of them: what a part reads, and weights."""
        batch, pos, n, width = self.x.x.shape
        keys = {tuple(seen.value.shape): seen.key for seen in call.left}
        read, write = keys.get((batch, pos, width)), keys.get((batch, pos, n))
        if read is None or write is None:
            return None
        return FoundMix(call, read, write, keys.get((batch, pos, n, n)))

    def _written(self, now: _State, state: _State, mix: FoundMix) -> Value | None:
        """What a part puts out that makes some streams of others; None where nothing does."""
        keep = None if mix.keep is None else mix.call.element(mix.keep).value.double()
        kept = now.x if keep is None else keep.transpose(-1, -2) @ now.x
        weights = mix.call.element(mix.write).value.double()
        for value in self.values.values():
            if value.made and mix.call.end < value.made[0][0].end <= state.seen:
                total = kept + weights.unsqueeze(-1) * value.x.view(*now.x.shape[:2], 1, -1)
                if agree(total, state.x, mix.call.element(mix.write).value):
                    return value
        return None
