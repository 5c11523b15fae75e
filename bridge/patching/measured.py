"""The metric of each patch, by a sweep where that gives what whole runs give, by one run for each where not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bridge.bases.trials import by_position, by_row, read_by
from bridge.bridge import TransformerBridge
from bridge.hooks.hook_point import HookPoint
from bridge.patching.corrupted import CorruptedRun
from bridge.patching.memory import tokens_per_run
from bridge.patching.regions import changed_positions, differences
from bridge.patching.runs import PatchedRuns, may_start_later
from bridge.patching.steps import PatchStep
from bridge.patching.sweep import Job, Patch, Sweep, starts_at_first

#: From the logits ``[batch, pos, d_vocab]`` of one patched run to numbers.
Numbers = Callable[[Float[Tensor, "batch pos d_vocab"]], Float[Tensor, "..."]]
#: A sweep needs about two and a half runs before its first patch.
WORTHWHILE = 4


def measure(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    steps: Sequence[PatchStep],
    metric: Numbers,
    attention_mask: Int[Tensor, "batch pos"] | None,
    patches_per_run: int | Literal["auto"],
    report: Callable[[int], object],
) -> list[Tensor]:
    """The metric of each patch.

    Args:
        model: the bridge.
        tokens: the corrupted prompts.
        steps: the patches.
        metric: from the logits of one patched run to numbers.
        attention_mask: 1 for tokens and 0 for padding; None: no padding.
        patches_per_run: how many patches may be one batch.
        report: called with how many more patches are done.
    """
    batched = all(step.hook.point.axes.startswith("batch") and step.hook.point.stack == "blocks" for step in steps)
    if len(steps) > WORTHWHILE and batched and may_start_later(model):
        with torch.no_grad():
            sweep = _Measured(model, tokens, steps, metric, attention_mask, patches_per_run)
            if sweep.possible:
                return sweep.results(report)
    return _one_by_one(model, tokens, steps, metric, attention_mask, patches_per_run, report)


def mixing_rows(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    hooks: Sequence[HookPoint],
    attention_mask: Int[Tensor, "batch pos"] | None,
) -> list[str]:
    """The hook points in a basis that makes something else of a row in another batch.

    Args:
        model: the bridge.
        tokens: the prompts that it is tried on.
        hooks: any hook points.
        attention_mask: 1 for tokens and 0 for padding; None: no padding.
    """
    if not (reads := read_by(hooks)):
        return []
    with torch.no_grad():
        _, cache = model.run_with_cache(
            tokens, names_filter=list(dict.fromkeys(reads.values())), attention_mask=attention_mask
        )
        return [hook.name for hook, name in reads.items() if not by_row(hook, cache[name])]


def _one_by_one(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    steps: Sequence[PatchStep],
    metric: Numbers,
    attention_mask: Int[Tensor, "batch pos"] | None,
    patches_per_run: int | Literal["auto"],
    report: Callable[[int], object],
) -> list[Tensor]:
    """Each patch by a run through all positions; with ``"auto"`` alone, as hooks of the user may see batches."""
    together = 1 if patches_per_run == "auto" else patches_per_run
    if together > 1 and mixing_rows(model, tokens, [step.hook for step in steps], attention_mask):
        together = 1
    runs = PatchedRuns(model, tokens, [step.hook.point.depth for step in steps], attention_mask)
    results: list[Tensor] = []
    for hook, group in itertools.groupby(steps, key=lambda step: step.hook):
        of_layer = list(group)
        for at in range(0, len(of_layer), together):
            some = of_layer[at : at + together]
            results += [metric(logits) for logits in runs.logits(hook, [step.whole for step in some])]
            report(len(some))
    return results


class _Measured:
    """A sweep and its results. `possible` says whether it gives what whole runs give."""

    def __init__(
        self,
        model: TransformerBridge,
        tokens: Int[Tensor, "batch pos"],
        steps: Sequence[PatchStep],
        metric: Numbers,
        attention_mask: Int[Tensor, "batch pos"] | None,
        patches_per_run: int | Literal["auto"],
    ) -> None:
        self.model, self.steps, self.metric, self.patches_per_run = model, steps, metric, patches_per_run
        self.hooks = list(dict.fromkeys(step.hook for step in steps))
        keep = [step.hook.name for step in steps if step.region is not None]
        keep += read_by(self.hooks).values()
        layers = [hook.point.depth for hook in self.hooks]
        self.run = CorruptedRun(model, tokens, layers, list(dict.fromkeys(keep)), attention_mask)
        bases = [(hook, self.run.kept[name]) for hook, name in read_by(self.hooks).items()]
        self.possible = self._without_gradients() and all(by_row(hook, read) for hook, read in bases)
        if self.possible:
            self.whole = {hook for hook, read in bases if not by_position(hook, read)}
            self.jobs = self._jobs()
            # Where each patch leaves the first positions alone, no run has all of them.
            self.possible = not starts_at_first(self.jobs, self.run.length) or self.run.steps

    def _without_gradients(self) -> bool:
        """Whether the metric can do without gradients."""
        try:
            self.unpatched = self.metric(self.run.logits.clone())
        except RuntimeError:
            return False  # if it is for another reason, the plain way raises it again
        return True

    def results(self, report: Callable[[int], object]) -> list[Tensor]:
        """The metric of each patch, in the order of the patches."""
        found = [self.unpatched] * len(self.steps)
        report(len(self.steps) - len(self.jobs))
        for job, logits in Sweep(self.run, self._most).logits(self.jobs):
            numbers = self.metric(logits)
            if bool(numbers.isnan().any()) and not logits.computed:
                numbers = self.metric(logits.whole())  # something may have read past what was computed
            found[job.index] = numbers
            report(1)
        return found

    def _most(self, length: int) -> int:
        if self.patches_per_run != "auto":
            return self.patches_per_run
        size = self.run.logits.element_size()
        tokens = tokens_per_run(self.model.cfg, self.run.logits.device, self.run.length, size)
        return max(1, tokens // (self.run.batch * length))

    def _jobs(self) -> list[Job]:
        """The patches that change anything."""
        differs: dict[HookPoint, Bool[Tensor, "..."] | None] = {}
        for step in self.steps:
            if step.region is not None and step.hook not in differs:
                differs[step.hook] = differences(step.clean, self.run.kept[step.hook.name])
        jobs = []
        for index, step in enumerate(self.steps):
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
