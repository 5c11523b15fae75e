"""The metric of each patch, by a sweep where that gives what whole runs give, by one run for each where not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from bridge.bases.trials import by_position, by_row, read_by
from bridge.hooks.hook_point import HookPoint
from bridge.patching.corrupted import CorruptedRun
from bridge.patching.memory import tokens_per_run
from bridge.patching.regions import changed_positions, differences
from bridge.patching.runs import PatchedRuns, may_start_later
from bridge.patching.steps import Patches, PatchStep
from bridge.patching.sweep import Job, Patch, Sweep, starts_at_first

#: A sweep needs about two and a half runs before its first patch.
WORTHWHILE = 4


def measure(patches: Patches, patches_per_run: int | Literal["auto"]) -> list[Tensor]:
    """The metric of each patch.

    Args:
        patches: the patches.
        patches_per_run: how many of them may be one batch.
    """
    points = [step.hook.point for step in patches.steps]
    batched = all(point.axes.startswith("batch") and point.stack == "blocks" for point in points)
    if len(points) > WORTHWHILE and batched and may_start_later(patches.model):
        with torch.no_grad():
            sweep = _Measured(patches, patches_per_run)
            if sweep.possible:
                return sweep.results()
    return _one_by_one(patches, patches_per_run)


def mixing_rows(patches: Patches) -> list[str]:
    """The hook points in a basis that makes something else of a row in another batch.

    Args:
        patches: the patches, on whose prompts it is tried.
    """
    if not (reads := read_by(patches.hooks)):
        return []
    with torch.no_grad():
        _, cache = patches.model.run_with_cache(
            patches.tokens, names_filter=list(dict.fromkeys(reads.values())), attention_mask=patches.attention_mask
        )
        return [hook.name for hook, name in reads.items() if not by_row(hook, cache[name])]


def _one_by_one(patches: Patches, patches_per_run: int | Literal["auto"]) -> list[Tensor]:
    """Each patch by a run through all positions; with ``"auto"`` alone, as hooks of the user may see batches."""
    together = 1 if patches_per_run == "auto" else patches_per_run
    if together > 1 and mixing_rows(patches):
        together = 1
    depths = [step.hook.point.depth for step in patches.steps]
    runs = PatchedRuns(patches.model, patches.tokens, depths, patches.attention_mask)
    results: list[Tensor] = []
    for hook, group in itertools.groupby(patches.steps, key=lambda step: step.hook):
        of_layer = list(group)
        for at in range(0, len(of_layer), together):
            some = of_layer[at : at + together]
            results += [patches.metric(logits) for logits in runs.logits(hook, [step.whole for step in some])]
            patches.report(len(some))
    return results


class _Measured:
    """A sweep and its results. `possible` says whether it gives what whole runs give."""

    def __init__(self, patches: Patches, patches_per_run: int | Literal["auto"]) -> None:
        self.patches, self.patches_per_run = patches, patches_per_run
        hooks = patches.hooks
        reads = read_by(hooks)
        keep = dict.fromkeys([*(step.hook.name for step in patches.steps if step.region is not None), *reads.values()])
        layers = [hook.point.depth for hook in hooks]
        self.run = CorruptedRun(patches.model, patches.tokens, layers, list(keep), patches.attention_mask)
        bases = [(hook, self.run.kept[name]) for hook, name in reads.items()]
        self.possible = self._without_gradients() and all(by_row(hook, read) for hook, read in bases)
        if self.possible:
            self.whole = {hook for hook, read in bases if not by_position(hook, read)}
            self.jobs = self._jobs()
            # Where each patch leaves the first positions alone, no run has all of them.
            self.possible = not starts_at_first(self.jobs, self.run.length) or self.run.steps

    def _without_gradients(self) -> bool:
        """Whether the metric can do without gradients."""
        try:
            self.unpatched = self.patches.metric(self.run.logits.clone())
        except RuntimeError:
            return False  # if it is for another reason, the plain way raises it again
        return True

    def results(self) -> list[Tensor]:
        """The metric of each patch, in the order of the patches."""
        found = [self.unpatched] * len(self.patches.steps)
        self.patches.report(len(self.patches.steps) - len(self.jobs))
        for job, logits in Sweep(self.run, self._most).logits(self.jobs):
            numbers = self.patches.metric(logits)
            if bool(numbers.isnan().any()) and not logits.computed:
                numbers = self.patches.metric(logits.whole())  # something may have read past what was computed
            found[job.index] = numbers
            self.patches.report(1)
        return found

    def _most(self, length: int) -> int:
        if self.patches_per_run != "auto":
            return self.patches_per_run
        size = self.run.logits.element_size()
        tokens = tokens_per_run(self.patches.model.cfg, self.run.logits.device, self.run.length, size)
        return max(1, tokens // (self.run.batch * length))

    def _jobs(self) -> list[Job]:
        """The patches that change anything."""
        differs: dict[HookPoint, Bool[Tensor, "..."] | None] = {}
        for step in self.patches.steps:
            if step.region is not None and step.hook not in differs:
                differs[step.hook] = differences(step.clean, self.run.kept[step.hook.name])
        jobs = []
        for index, step in enumerate(self.patches.steps):
            changed = self._changed(step, differs.get(step.hook))
            if changed != []:
                start = changed[0] if changed and self.run.positions else 0
                jobs.append(Job(index, step.hook, start, _patch_from(step), changed, step.hook not in self.whole))
        return jobs

    def _changed(self, step: PatchStep, differs: Bool[Tensor, "..."] | None) -> list[int] | None:
        """The positions that a patch changes; None where that is not known."""
        region = step.region
        if region is None or differs is None or step.hook in self.whole:
            return None
        try:
            return changed_positions(region, step.place, differs)
        except (IndexError, ValueError):
            return None  # the setter says what does not fit


def _patch_from(step: PatchStep) -> Callable[[int], Patch]:
    return lambda start: lambda activation: step.later(activation, start)
