"""Lists of blocks that run in turn, each several times, on streams that are added to each other between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from adapters.architecture import Block
from adapters.automatic.blocks import FoundStack, numbered_members
from adapters.automatic.norms import norm_kind
from adapters.observe.calls import ModuleCall, Recording
from adapters.observe.tolerance import NEGLIGIBLE, agree
from adapters.paths import join, members_of, module_path, token_embedding


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
        and each.left and each.left[0].value.shape == entered.value.shape
        and (each.module is embedding or norm_kind(each))
    ]  # fmt: skip
    target = entered.value.double().flatten()
    for one, other in itertools.combinations(before, 2):
        columns = torch.stack([one.left[0].value.double().flatten(), other.left[0].value.double().flatten()], 1)
        weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        if agree(columns @ weights, target, entered.value) and bool((weights > NEGLIGIBLE).all()):
            return tuple((each, float(f"{w:.5g}")) for each, w in zip((one, other), weights.tolist(), strict=True))
    return None
