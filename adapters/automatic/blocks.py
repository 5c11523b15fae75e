"""Where the lists of blocks are, by what passes from block to block."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters.architecture import Block, Terms
from adapters.automatic.norms import norm_kind
from adapters.inputs import accepted_arguments
from adapters.observe.observe import BorderTensor, ModuleCall, NotFound, Recording
from adapters.observe.recognised import NEGLIGIBLE, agree
from adapters.points import core_of, is_inside, join, members_of, module_path, token_embedding


@dataclass(frozen=True)
class FoundStack:
    """A list of blocks that one stream runs through.

    Attributes:
        path: of the list.
        blocks: the calls of its blocks that ran, in order.
        outputs: what each passes on.
        indices: where in the list each stands.
        length: of the list.
        members: where each block stands in the list, if that is not its index: one that runs several times has all of
            them.
        ends: for blocks that are no modules, those that the stream enters first and leaves last, relative to `path`.
        block_inputs: of blocks that are not given what left the one before, by their index: the calls outside of the
            blocks that what they are given is the sum of, each with its factor.
        positions_first: what enters them is ``[pos, batch, d_model]``.
        n_streams: how many streams it carries, where they are several.
        rescaled: what the stream is multiplied with before a block, by the block's index, where that is not one.
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
        """What enters the first."""
        entered = self.blocks[0].entered
        assert entered is not None
        return entered

    @property
    def d_model(self) -> int:
        return self.stream.value[0, 0].numel() // (self.n_streams or 1)


def find_stacks(model: nn.Module, recording: Recording) -> tuple[list[FoundStack], str]:
    """The lists of blocks, in the order in which they ran, and, where there is none, why.

    A block is called once. What leaves it is what enters the next: a tensor ``[batch, pos, d_model]``. Of several, some
    may not run: those that look at images.

    Args:
        model: the model.
        recording: of its run.
    """
    found: list[FoundStack] = []
    almost: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or is_inside(path, *(s.path for s in found)):
            continue
        stack, reason = _of_list(path, module, recording)
        found += [] if stack is None else [stack]
        almost += [reason] if reason else []
    if not found and (other := _parallel(model, recording) or _siblings(model, recording)):
        found.append(other)
    found.sort(key=lambda stack: stack.blocks[0].start)
    return found, "" if found else "; ".join(almost[:2]) or "no list of blocks that each run once"


def _of_list(path: str, module: nn.Module, recording: Recording) -> tuple[FoundStack | None, str]:
    """The blocks of a list of modules; else why they are none, where that is to be said."""
    members = members_of(module)
    paths = [join(path, str(index)) for index in range(len(members))]
    calls = [recording.of(at) for at in paths]
    ran, again = [i for i, each in enumerate(calls) if len(each) == 1], any(len(each) > 1 for each in calls)
    if not ran or again or (len(ran) < len(calls) and len(ran) < 2):
        inner = [join(at, f"{name}.{index}") for at, each in zip(paths, members, strict=True)
                 for name, child in each.named_children() if isinstance(child, nn.ModuleList)
                 for index in range(len(members_of(child)))]  # fmt: skip
        shared = _shared(path, inner, recording) or _shared(path, paths, recording)
        said = shared is None and again and len(paths) > 1
        return shared, f"the blocks of {path} run more than once" if said else ""
    blocks = tuple(calls[index][0] for index in ran)
    if any(block.entered is None or not block.left for block in blocks):
        return None, ""
    return _chained(path, blocks, recording, ran, len(calls))


def _shared(path: str, paths: list[str], recording: Recording) -> FoundStack | None:
    """Modules of which some may run several times, each time as a block of its own: their calls follow each other.

    The calls of such, and those inside of them, are named by their number from then on.
    """
    calls = sorted((call for each in paths for call in recording.of(each)), key=lambda call: call.start)
    if len(calls) < 2 or any(call.entered is None or not call.left for call in calls):
        return None
    found, _ = _chained(path, tuple(calls), recording, list(range(len(calls))), len(calls))
    if found is None:
        return None
    totals = Counter(call.path for call in calls)
    several = {path for path, count in totals.items() if count > 1}
    return replace(found, members=numbered_members(recording, calls, path, several))


def numbered_members(
    recording: Recording, calls: Sequence[ModuleCall], path: str, several: Collection[str]
) -> tuple[str, ...]:
    """Where calls stand from a path on; those of modules that run several times are named by their number."""
    counts, members = Counter[str](), []
    for call in calls:
        old, number = call.path, counts[call.path]
        counts[old] += 1
        if old in several:
            recording.rename(call, f"{old}@{number}")
        members.append(call.path[len(path) + 1 :] if path else call.path)
    return tuple(members)


def _siblings(model: nn.Module, recording: Recording) -> FoundStack | None:
    """Blocks that stand in one module, of one class, among others or without a list, or one that runs again.

    The outermost module, and the longest row of calls in it.
    """
    for path, module in model.named_modules():
        kinds: dict[type[nn.Module], list[str]] = {}
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                kinds.setdefault(type(child), []).append(join(path, name))
        found = [stack for paths in kinds.values() if (stack := _shared(path, paths, recording))]
        if found:
            return max(found, key=lambda stack: stack.length)
    return None


def _parallel(model: nn.Module, recording: Recording) -> FoundStack | None:
    """Blocks that are no modules: lists side by side, of which each has one member in every block (XLM)."""
    for path, module in model.named_modules():
        lists = [
            [calls[0] if len(calls := recording.of(join(path, name, str(i)))) == 1 else None for i in range(len(child))]
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList)
        ]
        whole = [[call for call in each if call is not None] for each in lists if each and None not in each]
        if len(whole) < 2 or len({len(each) for each in whole}) > 1:
            continue
        found = []
        ends = []
        for together in zip(*whole, strict=True):
            calls = sorted(together, key=lambda call: call.start)
            first, last = calls[0], calls[-1]
            if first.entered is None or len(last.left) != 1 or last.returned.key is not None:
                break
            block = ModuleCall(path, module, output=last.output, start=first.start - 1, end=last.end)
            block.entered, block.left = first.entered, list(last.left)
            found.append(block)
            ends.append((first.path[len(path) + 1 :], last.path[len(path) + 1 :]))
        stack = None
        if len(found) == len(whole[0]):
            stack, _ = _chained(path, tuple(found), recording, list(range(len(found))), len(found))
        if stack is not None:
            return replace(stack, members=("",) * len(found), ends=tuple(ends))
    return None


def number_calls(block: ModuleCall, recording: Recording) -> None:
    """Names the calls of modules that run several times in one block by their number."""
    inside = recording.between(block.start, block.end)
    for path, count in Counter(call.path for call in inside).items():
        if count > 1 and "@" not in path:
            numbered_members(recording, [call for call in inside if call.path == path], "", {path})


def number_norms(stacks: list[FoundStack], recording: Recording) -> None:
    """Names the calls of norms that run several times outside of blocks (before the first and behind the last)."""
    blocks = [block for stack in stacks for block in stack.blocks]
    outside = [call for call in recording.calls if not any(block.holds(call) for block in blocks)]
    for path, count in Counter(call.path for call in outside).items():
        calls = [call for call in outside if call.path == path]
        if 1 < count == len(recording.of(path)) and all(norm_kind(call) for call in calls):
            numbered_members(recording, calls, "", {path})


def _chained(
    path: str, blocks: tuple[ModuleCall, ...], recording: Recording, ran: list[int], length: int
) -> tuple[FoundStack | None, str]:
    outputs: list[BorderTensor] = []
    rescaled: dict[int, float] = {}
    for index, block in enumerate(blocks):
        assert block.entered is not None
        shape = block.entered.value.shape
        alike = [seen for seen in block.left if seen.value.shape == shape]
        if index + 1 < len(blocks):
            following = blocks[index + 1].entered
            assert following is not None
            passed = [seen for seen in alike if seen.mark == following.mark]
            for seen in alike if not passed else ():
                if factor := power_between(following.value, seen.value):
                    rescaled[ran[index + 1]], passed = factor, [seen]
            if not passed:
                return None, f"what leaves a block of {path} is not what enters the next" if alike else ""
        else:
            passed = [seen for seen in alike if not outputs or seen.key == outputs[-1].key] or alike
            if not passed:
                return None, ""
        outputs.append(passed[0])
    stream = tuple(outputs[0].value.shape)
    positions_first = len(stream) == 3 and recording.turned(outputs[0].value) and len(blocks) > 1
    several = len(stream) == 4 and stream[:2] == (recording.batch, recording.pos) and len(blocks) > 1
    if not several and (len(stream) != 3 or (stream[0] != recording.batch and not positions_first)):
        said = f"the stream of {path} has the shape {stream}, not [batch, pos, d_model]"
        return None, said if len(blocks) > 1 else ""
    if len({seen.key for seen in outputs}) > 1:
        return None, f"the blocks of {path} return the stream at different places"
    return FoundStack(
        path, blocks, tuple(outputs), tuple(ran), length, rescaled=rescaled, positions_first=positions_first
    ), ""


def power_between(x: Tensor, y: Tensor) -> float | None:
    """The power of two that makes one tensor of another; None where there is none."""
    square = float(y.double().pow(2).sum())
    factor = 0.0 if square == 0 or x.shape != y.shape else float((x.double() * y.double()).sum()) / square
    near = 2.0 ** round(math.log2(factor)) if factor > 0 else 0.0
    return near if near and torch.equal(x, y * near) else None


def why_no_layers(found: FoundStack, two: bool, main: str | None) -> str:
    """Why a run cannot start or stop at a layer."""
    if two:
        return "its decoder needs the encoder's output"
    if main is not None:
        return f"its first block reads what is made of {main}"
    if found.n_streams is not None:
        return f"its blocks carry {found.n_streams} streams"
    if found.positions_first:
        return "its blocks are given positions before the batch"
    if found.ends:
        return "its blocks are no modules of their own"
    return "its blocks are one module" if any("@" in member for member in found.members) else ""


def refuse_two_towers(model: nn.Module) -> None:
    """A model that compares texts with images or sound has two streams that never meet, and no logits of tokens.

    Args:
        model: a Hugging Face model.

    Raises:
        NotFound: this is one.
    """
    core = core_of(model)
    accepted = accepted_arguments(type(core).forward)
    inside = [name for name, child in core.named_children() if isinstance(child, PreTrainedModel)]
    # What asks for the contrastive loss: CLIP and its kin take it.
    if {"input_ids", "return_loss"} <= set(accepted) and len(inside) == 2:
        raise NotFound(
            f"{type(core).__name__} compares texts with images or sound: its two streams never meet. "
            f"Each is a model that can be wrapped: {' and '.join(f'model.{name}' for name in inside)}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Lists of blocks that run in turn, each several times, on streams that are added to each other between.
# ----------------------------------------------------------------------------------------------------------------------


def find_cycles(model: nn.Module, recording: Recording) -> FoundStack | None:
    """All calls of such blocks, as one list; None where they are none.

    What enters one is what left the one before it, or a sum of two: of what norms outside of the blocks put out, and of
    the token embedding. The calls, and those inside of them, are named by their number from then on.

    Args:
        model: the model.
        recording: of its run.
    """
    lists = [
        [join(path, str(index)) for index in range(len(members_of(module)))]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    again = [paths for paths in lists if paths and all(len(recording.of(path)) > 1 for path in paths)]
    calls = sorted((call for path in itertools.chain(*again) for call in recording.of(path)), key=lambda c: c.start)
    if len(again) < 2 or any(call.entered is None or not call.left for call in calls):
        return None
    shape = (recording.batch, recording.pos)
    outputs = [next((s for s in call.left if s.value.ndim == 3 and s.value.shape[:2] == shape), None) for call in calls]
    passed = [seen for seen in outputs if seen is not None]
    if len(passed) < len(calls) or len({seen.key for seen in passed}) > 1:
        return None
    summed = {}
    for index, (call, before) in enumerate(zip(calls[1:], passed, strict=False), 1):
        assert call.entered is not None
        if call.entered.mark != before.mark:
            sources = _sources(model, recording, calls, call)
            if sources is None:
                return None
            summed[index] = sources
    parts = zip(*(call.path.split(".") for call in calls), strict=False)
    path = ".".join(same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, parts))
    return FoundStack(
        path,
        tuple(calls),
        tuple(passed),
        tuple(range(len(calls))),
        len(calls),
        members=numbered_members(recording, calls, path, {call.path for call in calls}),
        block_inputs={
            index: tuple((recording.numbered(c), factor) for c, factor in each) for index, each in summed.items()
        },
    )


def alike(blocks: list[Block], members: Sequence[str], not_offered: dict[str, str], name: str) -> list[Block]:
    """The blocks, where each that is another call of one module looks as that call of which most was found out.

    Some calls may run without gradients, by which parts are told.

    Args:
        blocks: the declarations.
        members: where they stand.
        not_offered: what is not offered, and why; what is not so any more is taken away.
        name: of the list of blocks.
    """

    def unknown(index: int) -> int:
        return sum(each.startswith(f"{name}.{index}.") for each in not_offered)

    found = list(blocks)
    for index, member in enumerate(members):
        same = [other for other, at in enumerate(members) if module_path(at) == module_path(member)]
        best = min(same, key=unknown)
        if unknown(best) < unknown(index):
            found[index] = found[best]
            for each in [each for each in not_offered if each.startswith(f"{name}.{index}.")]:
                del not_offered[each]
                if (at_best := each.replace(f".{index}.", f".{best}.", 1)) in not_offered:
                    not_offered[each] = not_offered[at_best]
    return found


def _sources(
    model: nn.Module, recording: Recording, blocks: Sequence[ModuleCall], call: ModuleCall
) -> tuple[tuple[ModuleCall, float], ...] | None:
    """The two that what enters a block is the sum of, each with its factor."""
    entered = call.entered
    assert entered is not None
    embedding = token_embedding(model)
    before = [
        each for each in recording.calls
        if -1 < each.end <= call.start and not any(block.holds(each) for block in blocks)
        and each.left and each.returned.value.shape == entered.value.shape
        and (each.module is embedding or norm_kind(each))
    ]  # fmt: skip
    target = entered.value.double().flatten()
    for one, other in itertools.combinations(before, 2):
        columns = torch.stack([one.returned.value.double().flatten(), other.returned.value.double().flatten()], 1)
        weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        if agree(columns @ weights, target, entered.value) and bool((weights > NEGLIGIBLE).all()):
            return tuple((each, float(f"{w:.5g}")) for each, w in zip((one, other), weights.tolist(), strict=True))
    return None
