"""Find the lists of blocks in a recording: each block's output is the next block's input."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters.architecture import Block, Terms
from adapters.automatic.norms import norm_kind, relative
from adapters.inputs import accepted_arguments
from adapters.observe.observe import BorderTensor, ModuleCall, NotFound, Recording
from adapters.observe.recognised import NEGLIGIBLE, agree, factor_of
from adapters.points import core_of, is_inside, join, members_of, module_path, token_embedding


@dataclass(frozen=True)
class FoundStack:
    """A list of blocks with one residual stream.

    Attributes:
        path: the path of the list.
        blocks: the calls of its blocks that ran, in order.
        outputs: the stream that each block outputs.
        indices: the index of each block in the list.
        length: the length of the list.
        members: the path of each block in the list, if that is not its index. A module that runs
            several times has several entries.
        ends: for blocks that are not modules, the first and the last module on the stream, relative
            to `path`.
        rescaled: the factor of the stream before a block, by the block's index, if it is not 1.
        block_inputs: inputs of blocks that differ from the previous block's output, by block index:
            the calls outside the blocks that are summed, each with its factor.
        positions_first: whether their inputs are ``[pos, batch, d_model]``.
        n_streams: the number of streams, if there are several.
    """

    path: str
    blocks: tuple[ModuleCall, ...]
    outputs: tuple[BorderTensor, ...]
    indices: tuple[int, ...]
    length: int
    members: tuple[str, ...] = ()
    ends: tuple[tuple[str, str], ...] = ()
    rescaled: Mapping[int, float] = field(default_factory=dict)
    block_inputs: Mapping[int, Terms] = field(default_factory=dict)
    positions_first: bool = False
    n_streams: int | None = None

    @property
    def stream(self) -> BorderTensor:
        """Return the input of the first block."""
        entered = self.blocks[0].entered
        assert entered is not None
        return entered

    @property
    def d_model(self) -> int:
        return self.stream.value[0, 0].numel() // (self.n_streams or 1)


def find_stacks(model: nn.Module, recording: Recording) -> tuple[list[FoundStack], str]:
    """Return the lists of blocks in the order in which they ran, and the reason if there is none.

    A block is called once. Its output is the input of the next: a tensor ``[batch, pos, d_model]``.
    Some blocks of a list may not run, such as those for images.

    Args:
        model: the model.
        recording: the recording of its run.
    """
    stacks: list[FoundStack] = []
    reasons: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if is_inside(path, *(stack.path for stack in stacks)):
            continue
        stack, reason = _of_list(path, module, recording)
        if stack is not None:
            stacks.append(stack)
        elif reason:
            reasons.append(reason)
    if not stacks and (other := _parallel(model, recording) or _siblings(model, recording)):
        stacks.append(other)
    if stacks:
        return sorted(stacks, key=lambda stack: stack.blocks[0].start), ""
    return [], "; ".join(reasons[:2]) or "no list of blocks in which each runs once"


def _of_list(path: str, module: nn.Module, recording: Recording) -> tuple[FoundStack | None, str]:
    """Return the blocks of a list of modules, or None and a reason (empty if it is not worth
    reporting).
    """
    paths = _member_paths(path, module)
    calls = [recording.of(member) for member in paths]
    ran = [index for index, each in enumerate(calls) if len(each) == 1]
    repeats = any(len(each) > 1 for each in calls)
    if ran and not repeats and len(ran) >= min(2, len(calls)):
        blocks = [calls[index][0] for index in ran]
        return _chained(path, blocks, recording, ran, len(calls))
    inner = []
    for member, block in zip(paths, members_of(module), strict=True):
        for name, child in block.named_children():
            if isinstance(child, nn.ModuleList):
                inner += _member_paths(join(member, name), child)
    shared = _shared(path, inner, recording) or _shared(path, paths, recording)
    if shared is None and repeats and len(paths) > 1:
        return None, f"the blocks of {path} run more than once"
    return shared, ""


def _member_paths(path: str, module: nn.Module) -> list[str]:
    """Return the paths of the members of a list."""
    return [join(path, str(index)) for index in range(len(members_of(module)))]


def _shared(path: str, paths: list[str], recording: Recording) -> FoundStack | None:
    """Return a list of blocks in which modules may run several times, each call as a block of its
    own.

    The calls of such modules, and the calls inside them, are numbered from then on.
    """
    calls = _calls_of(paths, recording)
    if len(calls) < 2:
        return None
    stack, _ = _chained(path, calls, recording)
    if stack is None:
        return None
    totals = Counter(call.path for call in calls)
    several = {path for path, count in totals.items() if count > 1}
    return replace(stack, members=numbered_members(recording, calls, path, several))


def _calls_of(paths: Iterable[str], recording: Recording) -> list[ModuleCall]:
    """Return the calls of several modules, in order."""
    calls = [call for path in paths for call in recording.of(path)]
    return sorted(calls, key=lambda call: call.start)


def numbered_members(
    recording: Recording, calls: Sequence[ModuleCall], path: str, several: Collection[str]
) -> tuple[str, ...]:
    """Return the paths of calls relative to `path`, numbering the calls of modules that run several
    times.
    """
    counts = Counter[str]()
    members = []
    for call in calls:
        before = call.path
        number = counts[call.path]
        counts[before] += 1
        if before in several:
            recording.rename(call, f"{before}@{number}")
        members.append(relative(call.path, path))
    return tuple(members)


def _siblings(model: nn.Module, recording: Recording) -> FoundStack | None:
    """Return blocks of one class that are direct children of a module instead of members of a list,
    or one block that runs several times. The module may have other children.

    The outermost module with such blocks is chosen, and the longest sequence of calls in it.
    """
    for path, module in model.named_modules():
        by_class: dict[type[nn.Module], list[str]] = {}
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                by_class.setdefault(type(child), []).append(join(path, name))
        stacks = []
        for paths in by_class.values():
            if stack := _shared(path, paths, recording):
                stacks.append(stack)
        if stacks:
            return max(stacks, key=lambda stack: stack.length)
    return None


def _parallel(model: nn.Module, recording: Recording) -> FoundStack | None:
    """Return blocks that are not modules: parallel lists, each with one member in every block
    (XLM).
    """
    for path, module in model.named_modules():
        lists = _lists_run_once(path, module, recording)
        lengths = {len(calls) for calls in lists}
        if len(lists) < 2 or len(lengths) > 1:
            continue
        blocks = []
        ends = []
        for members in zip(*lists, strict=True):
            calls = sorted(members, key=lambda call: call.start)
            first, last = calls[0], calls[-1]
            blocks.append(_around(path, module, first, last))
            ends.append((relative(first.path, path), relative(last.path, path)))
        stack, _ = _chained(path, blocks, recording)
        if stack is not None:
            return replace(stack, members=("",) * len(blocks), ends=tuple(ends))
    return None


def _lists_run_once(path: str, module: nn.Module, recording: Recording) -> list[list[ModuleCall]]:
    """Return the calls of each list in a module whose members all run once."""
    lists = []
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList) or not len(child):
            continue
        calls = [recording.of(member) for member in _member_paths(join(path, name), child)]
        if all(len(each) == 1 for each in calls):
            lists.append([each[0] for each in calls])
    return lists


def _around(path: str, module: nn.Module, first: ModuleCall, last: ModuleCall) -> ModuleCall:
    """Return an artificial call that represents a block, from its first to its last module."""
    return ModuleCall(
        path,
        module,
        output=last.output,
        start=first.start - 1,
        end=last.end,
        entered=first.entered,
        outputs=[last.only_output] if last.only_output else [],
    )


def number_calls(block: ModuleCall, recording: Recording) -> None:
    """Number the calls of modules that run several times in one block."""
    inside: dict[str, list[ModuleCall]] = {}
    for call in recording.between(block.start, block.end):
        inside.setdefault(call.path, []).append(call)
    for path, calls in inside.items():
        if len(calls) > 1 and "@" not in path:
            numbered_members(recording, calls, "", {path})


def number_norms(stacks: list[FoundStack], recording: Recording) -> None:
    """Number the calls of norms that run several times outside of blocks (before the first or after
    the last).
    """
    blocks = [block for stack in stacks for block in stack.blocks]
    outside: dict[str, list[ModuleCall]] = {}
    for call in recording.calls:
        if not any(block.holds(call) for block in blocks):
            outside.setdefault(call.path, []).append(call)
    for path, calls in outside.items():
        if len(calls) < 2 or len(calls) != len(recording.of(path)):
            continue
        if all(norm_kind(call) for call in calls):
            numbered_members(recording, calls, "", {path})


def _chained(
    path: str,
    blocks: Sequence[ModuleCall],
    recording: Recording,
    ran: Sequence[int] | None = None,
    length: int | None = None,
) -> tuple[FoundStack | None, str]:
    """Return blocks as a stack if each block's output is the next block's input, or None and a
    reason.

    Args:
        path: the path of the list.
        blocks: the calls of the blocks.
        recording: the recording of the run.
        ran, length: the index of each block, and the length of the list; None: all of it ran.
    """
    if any(block.entered is None or not block.outputs for block in blocks):
        return None, ""
    ran = range(len(blocks)) if ran is None else ran
    outputs, powers, reason = _streams_between(blocks, path)
    if not outputs:
        return None, reason
    first = outputs[0]
    several = len(blocks) > 1
    positions_first = several and first.value.ndim == 3 and recording.turned(first.value)
    if not positions_first and not _has_rows_first(first.value, recording, several):
        shape = tuple(first.value.shape)
        reason = f"the stream of {path} has the shape {shape}, not [batch, pos, d_model]"
        return None, reason if several else ""
    if len({output.key for output in outputs}) > 1:
        return None, f"the blocks of {path} return the stream at different places"
    stack = FoundStack(
        path,
        tuple(blocks),
        tuple(outputs),
        tuple(ran),
        len(blocks) if length is None else length,
        rescaled={ran[place]: power for place, power in powers.items()},
        positions_first=positions_first,
    )
    return stack, ""


def _streams_between(
    blocks: Sequence[ModuleCall], path: str
) -> tuple[list[BorderTensor], dict[int, float], str]:
    """Return the stream after each block, the scale factors between blocks, and a reason.

    A factor multiplies a block's output before the next block reads it. The factors are keyed by
    the next block's index in `blocks`; factors of 1 are omitted. Without a stream, the first two
    results are empty, and the third says why ("" if a block returns no tensor of its input's
    shape).

    Args:
        blocks: the calls of the blocks, in order.
        path: the path of their list, for the reason.
    """
    outputs: list[BorderTensor] = []
    powers: dict[int, float] = {}
    for place, following in enumerate(blocks[1:], 1):
        stream, power, reason = _passed(blocks[place - 1], following, path)
        if stream is None:
            return [], {}, reason
        outputs.append(stream)
        if power != 1:
            powers[place] = power
    alike = _of_stream_shape(blocks[-1])
    if not alike:
        return [], {}, ""
    if outputs:
        at_same_place = [output for output in alike if output.key == outputs[-1].key]
        alike = at_same_place or alike
    outputs.append(alike[0])
    return outputs, powers, ""


def _has_rows_first(stream: Tensor, recording: Recording, several: bool) -> bool:
    """Tell whether a tensor is ``[batch, pos, d_model]``, or has an axis of streams in between."""
    if stream.ndim == 3:
        return stream.shape[0] == recording.batch
    if stream.ndim != 4 or not several:
        return False
    return stream.shape[:2] == (recording.batch, recording.pos)


def _of_stream_shape(block: ModuleCall) -> list[BorderTensor]:
    """Return the outputs of a block that have the shape of its input."""
    assert block.entered is not None
    shape = block.entered.value.shape
    return [output for output in block.outputs if output.value.shape == shape]


def _passed(
    block: ModuleCall, following: ModuleCall, path: str
) -> tuple[BorderTensor | None, float, str]:
    """Return the output of a block that becomes the next block's input, the power of two that
    multiplies it on the way, and, if there is no such output, the reason.
    """
    assert following.entered is not None
    alike = _of_stream_shape(block)
    for output in alike:
        if following.reads(output.mark):
            return output, 1.0, ""
    for output in reversed(alike):
        if power := power_between(following.entered.value, output.value):
            return output, power, ""
    reason = f"what leaves a block of {path} is not what enters the next" if alike else ""
    return None, 1.0, reason


def power_between(x: Tensor, y: Tensor) -> float | None:
    """Return the power of two by which one tensor is a multiple of another; None if
    there is none.
    """
    if x.shape != y.shape:
        return None
    factor = factor_of(x.double(), y.double())
    if not factor > 0:  # nor is it of zeros
        return None
    power = 2.0 ** round(math.log2(factor))
    if torch.equal(x, y * power):
        return power
    return None


def why_no_layers(stack: FoundStack, two: bool, main: str | None) -> str:
    """Return the reason why a run cannot start or stop at a layer; empty if it can."""
    if two:
        return "its decoder needs the encoder's output"
    if main is not None:
        return f"its first block reads what is made of {main}"
    if stack.n_streams is not None:
        return f"its blocks carry {stack.n_streams} streams"
    if stack.positions_first:
        return "its blocks get tensors with positions before the batch"
    if stack.ends:
        return "its blocks are not modules"
    if any("@" in member for member in stack.members):
        return "its blocks are one module"
    return ""


def refuse_two_towers(model: nn.Module) -> None:
    """Raise an error for a model that compares texts with images or sound: it has two separate
    streams, and no logits of tokens.

    Args:
        model: a Hugging Face model.

    Raises:
        NotFound: the model is one.
    """
    core = core_of(model)
    accepted = accepted_arguments(type(core).forward)
    inside = [name for name, child in core.named_children() if isinstance(child, PreTrainedModel)]
    # `return_loss` requests the contrastive loss in CLIP and similar models.
    if {"input_ids", "return_loss"} <= set(accepted) and len(inside) == 2:
        raise NotFound(
            f"{type(core).__name__} compares texts with images or sound: its two streams never"
            " meet. Each is a model that can be wrapped:"
            f" {' and '.join(f'model.{name}' for name in inside)}"
        )


# --------------------------------------------------------------------------------------------------
# Lists of blocks that run alternately, each several times, with their streams added in between.
# --------------------------------------------------------------------------------------------------


def find_cycles(model: nn.Module, recording: Recording) -> FoundStack | None:
    """Return all calls of blocks that run in cycles (HRM) as one list; None if there are none.

    A block's input is the previous block's output, or a sum of two tensors: outputs of norms
    outside the blocks, or the token embedding. The calls, and the calls inside them, are numbered
    from then on.

    Args:
        model: the model.
        recording: the recording of its run.
    """
    again = _lists_run_again(model, recording)
    calls = _calls_of(itertools.chain(*again), recording)
    if len(again) < 2 or any(call.entered is None for call in calls):
        return None
    outputs = _streams(calls, recording)
    inputs: dict[int, tuple[tuple[ModuleCall, float], ...]] = {}
    for index, (call, before) in enumerate(zip(calls[1:], outputs, strict=False), 1):
        if not call.reads(before.mark):
            inputs[index] = _sources(model, recording, calls, call)
    if not outputs or not all(inputs.values()):
        return None
    path = _common_path([call.path for call in calls])
    members = numbered_members(recording, calls, path, {call.path for call in calls})
    block_inputs: dict[int, Terms] = {}
    for index, sources in inputs.items():
        block_inputs[index] = tuple((recording.numbered(c), factor) for c, factor in sources)
    return FoundStack(
        path,
        tuple(calls),
        tuple(outputs),
        tuple(range(len(calls))),
        len(calls),
        members=members,
        block_inputs=block_inputs,
    )


def _lists_run_again(model: nn.Module, recording: Recording) -> list[list[str]]:
    """Return the paths of the members of each list whose members all run several times."""
    lists = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        paths = _member_paths(path, module)
        if paths and all(len(recording.of(member)) > 1 for member in paths):
            lists.append(paths)
    return lists


def _streams(calls: Sequence[ModuleCall], recording: Recording) -> list[BorderTensor]:
    """Return the output ``[batch, pos, d_model]`` of each call; an empty list if a call has none,
    or if the calls return it at different places.
    """
    streams = []
    for call in calls:
        for output in call.outputs:
            shape = output.value.shape
            if len(shape) == 3 and shape[:2] == (recording.batch, recording.pos):
                streams.append(output)
                break
    places = {stream.key for stream in streams}
    if len(streams) == len(calls) and len(places) == 1:
        return streams
    return []


def _common_path(paths: Sequence[str]) -> str:
    """Return the path of the innermost module around several ones."""
    parts = []
    for same in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(same)) > 1:
            break
        parts.append(same[0])
    return ".".join(parts)


def alike(
    blocks: list[Block], members: Sequence[str], not_offered: dict[str, str], name: str
) -> list[Block]:
    """Return the blocks with one declaration for all calls of the same module: that of the call
    about which most is known.

    Some calls may run without gradients, which are needed to identify parts.

    Args:
        blocks: the declarations.
        members: their paths in the list.
        not_offered: reasons for unavailable hook points; entries that no longer apply are removed.
        name: the name of the list of blocks.
    """

    def prefix(index: int) -> str:
        return f"{name}.{index}."

    def unknown(index: int) -> int:
        return sum(point.startswith(prefix(index)) for point in not_offered)

    result = list(blocks)
    calls: dict[str, list[int]] = {}
    for index, member in enumerate(members):
        calls.setdefault(module_path(member), []).append(index)
    for index, member in enumerate(members):
        best = min(calls[module_path(member)], key=unknown)
        if unknown(best) >= unknown(index):
            continue
        result[index] = result[best]
        for point in [point for point in not_offered if point.startswith(prefix(index))]:
            del not_offered[point]
            point_of_best = point.replace(prefix(index), prefix(best), 1)
            if point_of_best in not_offered:
                not_offered[point] = not_offered[point_of_best]
    return result


def _sources(
    model: nn.Module, recording: Recording, blocks: Sequence[ModuleCall], call: ModuleCall
) -> tuple[tuple[ModuleCall, float], ...]:
    """Return the two calls whose weighted sum is a block's input, each with its factor; an empty
    tuple if there are none.
    """
    entered = call.entered
    assert entered is not None
    embedding = token_embedding(model)
    before = []
    for other in recording.before(call.start):
        if not other.outputs or other.value.shape != entered.value.shape:
            continue
        if any(block.holds(other) for block in blocks):
            continue
        if other.module is embedding or norm_kind(other):
            before.append(other)
    target = entered.value.double().flatten()
    for pair in itertools.combinations(before, 2):
        columns = torch.stack([other.value.double().flatten() for other in pair], 1)
        weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        if agree(columns @ weights, target, entered.value) and bool((weights > NEGLIGIBLE).all()):
            factors = [float(f"{weight:.5g}") for weight in weights.tolist()]
            return tuple(zip(pair, factors, strict=True))
    return ()
