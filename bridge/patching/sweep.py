"""A sweep of patches in as few runs as it takes, none of which computes what its patches cannot change.

A patch in layer l changes nothing below l, and a patch at position p nothing before p (a causal model). So the patched
prompts go through the layers as one batch which they join at the layer of their patch, from the corrupted residual
stream there; they start at the first position that changes, the keys and values before it being those of the corrupted
run; and logits are computed where the metric looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.views.basis import InBasis, dense
from bridge.bases.bases import by_position, by_row, read_by
from bridge.hooks.hooks import HookPoint
from bridge.patching.corrupted import (
    CorruptedRun,
    LazyLogits,
    LogitsAt,
    PatchedRuns,
    lazy,
    may_start_later,
    tokens_per_run,
)
from bridge.patching.setters import Patches, PatchStep, changed_positions, differences

#: What a run costs besides its tokens, for each layer, in tokens of one layer: reading the weights, mostly. (A sweep of
#: 12-layer GPT-2 on two cores takes the same time with 60 as with 160, 3 % more with 40, 6 % more with 20.)
RUN_COST = 80
#: More logits than this are not computed for all patches at once.
MOST_LOGITS = 2**25
#: Sets of positions whose logits are kept for neighbouring patches; a metric that looks at more pays for each.
MOST_KEPT = 4
#: Starting positions that are told apart.
MOST_STARTS = 128

Patch = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Job:
    """One patch of a sweep.

    Attributes:
        index: its place in the results.
        hook: where it stands.
        start: the first position that it changes; 0 where that is not known.
        patch: called with the first position that runs; gives what makes the patched activation.
        changed: the positions that it changes; None where they are not known.
        by_position: whether what is done to one position is the same whatever the others are (see `by_position`).
        basis: the point in a basis whose activation is patched, where `hook` is one that shows what it stands on.
    """

    index: int
    hook: HookPoint
    start: int
    patch: Callable[[int], Patch]
    changed: list[int] | None = None
    by_position: bool = True
    basis: HookPoint | None = None

    @property
    def layer(self) -> int:
        """The layer of the patch."""
        return self.hook.point.depth


def groups(jobs: Sequence[Job], length: int, batch: int, n_layers: int) -> list[tuple[int, list[Job]]]:
    """Patches that go together, each group with the position that it starts at.

    Fewer groups are fewer runs, more groups start later: the cut that costs least by `RUN_COST`.

    Args:
        jobs: the patches.
        length: how many positions there are.
        batch: how many prompts.
        n_layers: how many layers.

    Example:
        >>> from bridge.patching.sweep import groups
        >>> groups([], 10, 1, 4)
        []
    """
    width = -(-length // MOST_STARTS)
    by_start: dict[int, list[Job]] = {}
    for job in jobs:
        by_start.setdefault(job.start // width * width, []).append(job)
    starts = sorted(by_start)
    work = [sum(n_layers - job.layer for job in by_start[start]) * batch for start in starts]
    fixed = RUN_COST * (n_layers - min((job.layer for job in jobs), default=0))
    # best[i]: the least cost of everything from the i-th start on, and where its first group ends.
    best: list[tuple[float, int]] = [(0.0, 0)] * (len(starts) + 1)
    for first in range(len(starts) - 1, -1, -1):
        options, together = [], 0
        for end in range(first + 1, len(starts) + 1):
            together += work[end - 1]
            options.append((fixed + together * (length - starts[first]) + best[end][0], end))
        best[first] = min(options)
    found, first = [], 0
    while first < len(starts):
        end = best[first][1]
        found.append((starts[first], [job for start in starts[first:end] for job in by_start[start]]))
        first = end
    return found


def starts_at_first(jobs: Sequence[Job], length: int) -> bool:
    """Whether a group of these patches starts at the first position.

    Args:
        jobs: the patches.
        length: how many positions there are.

    Example:
        >>> from bridge.patching.sweep import starts_at_first
        >>> starts_at_first([], 10)
        False
    """
    return any(job.start < -(-length // MOST_STARTS) for job in jobs)


class Sweep:
    """The patched runs of one corrupted run.

    Args:
        corrupted: the corrupted run; it can step from layer to layer.
        most: the most patches in one batch.
    """

    def __init__(self, corrupted: CorruptedRun, most: Callable[[int], int]) -> None:
        self.corrupted, self.most = corrupted, most
        self.n_layers = corrupted.model.cfg.n_layers

    def logits(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, LazyLogits]]:
        """Each patch and its logits, in the order of the runs.

        Args:
            jobs: the patches.
        """
        run = self.corrupted
        jobs = [self._later(patch_below_basis(job, run.model.hook_dict)) for job in jobs]
        for start, together in groups(jobs, run.length, run.batch, self.n_layers):
            together.sort(key=lambda job: (job.layer, job.hook.order, job.basis is not None, job.index))
            most = self.most(run.length - start)
            for some in _batches(together, most, self.n_layers - 1):
                stop = self._stop(some)
                ends = _Ends(run, self._through(some, start, stop), start, stop < self.n_layers)
                for number, job in enumerate(some):
                    yield job, ends.logits(number)

    def _later(self, job: Job) -> Job:
        """A patch of what a block leaves as one of what the next block is given: this block need not run."""
        after = self.corrupted.handed_on.get(job.hook.name)
        return job if after is None else replace(job, hook=self.corrupted.model.hook_dict[after])

    def _stop(self, jobs: Sequence[Job]) -> int:
        """The layer before which patches are all made: the last block is then run where logits are looked at."""
        early = all(job.layer < self.n_layers - 1 and not job.hook.point.linked for job in jobs)
        return self.n_layers - 1 if early and self.corrupted.ends_early else self.n_layers

    def _through(self, jobs: Sequence[Job], start: int, end: int) -> Float[Tensor, "rows pos d_model"]:
        """The residual stream before a layer, patch by patch. The patches are sorted by layer."""
        run = self.corrupted
        rows: Tensor | None = None
        done = 0
        while done < len(jobs):
            layer = jobs[done].layer
            joining = [job for job in jobs[done:] if job.layer == layer]
            done += len(joining)
            stop = jobs[done].layer if done < len(jobs) else end
            fresh = run.streams[layer][:, start:].repeat(len(joining), 1, 1)
            before = 0 if rows is None else len(rows)
            rows = fresh if rows is None else torch.cat([rows, fresh])
            hooks = []
            for (hook, basis), group in itertools.groupby(joining, key=lambda job: (job.hook, job.basis)):
                some = list(group)
                if basis is None:
                    patches = [job.patch(start) for job in some]
                    hooks.append((hook, _patching(patches, before, run.batch, len(rows))))
                else:
                    hooks.append((hook, _patching_features(basis, some, start, before, run.batch)))
                before += run.batch * len(some)
            rows = run.model.run_with_hooks(
                rows,
                fwd_hooks=hooks,
                start_at_layer=layer,
                stop_at_layer=stop,
                **run.options(layer, stop, len(rows) // run.batch, start),
            )
        assert rows is not None
        return rows


def _batches(jobs: Sequence[Job], most: int, last: int) -> Iterator[Sequence[Job]]:
    """The patches that run together.

    Others join them at later layers, where a new run begins: what hook points in later layers take over from an earlier
    one would be lost there. Those of the last layer go through all of it, the others do not.

    Args:
        jobs: the patches, sorted by layer.
        most: how many may run together.
        last: the last layer.
    """
    alone = any(job.hook.point.linked for job in jobs)
    for _, group in itertools.groupby(jobs, key=lambda job: job.layer if alone else job.layer == last):
        part = list(group)
        for at in range(0, len(part), most):
            yield part[at : at + most]


def _patching(patches: Sequence[Patch], before: int, batch: int, rows: int) -> Callable[..., Tensor]:
    """A hook that gives each patch its own rows of the batch, from `before` on."""

    def patch(activation: Tensor, hook: HookPoint) -> Tensor:
        if len(activation) != rows:
            raise ValueError(f"{hook.name} has no batch axis ({hook.point.axes}): use patches_per_run=1")
        if 0 in activation.stride():  # each head's view of one stream
            activation = activation.clone()
        parts = activation[before : before + batch * len(patches)].split(batch)
        for part, function in zip(parts, patches, strict=True):
            made = function(part)
            if made is not None and made is not part:
                part.copy_(made)
        return activation

    return patch


def patch_below_basis(job: Job, hooks: Mapping[str, HookPoint]) -> Job:
    """A patch in a basis as one of the point that the basis stands on, where that is the same.

    All patches that join at a layer begin with the same activation: there it is encoded once, not for each.

    Args:
        job: any patch.
        hooks: all hook points.
    """
    view = job.hook.view
    if not isinstance(view, InBasis) or job.hook.point.linked or not (view.edits_alone and job.by_position):
        return job
    base = hooks[job.hook.name.rpartition(".")[0]]
    own = [hook for hook in hooks.values() if hook.name.startswith(f"{base.name}.")]
    if isinstance(base.view, InBasis) or any(hook.listeners for hook in own):
        return job
    return replace(job, hook=base, basis=job.hook)


def _patching_features(
    basis: HookPoint, jobs: Sequence[Job], start: int, before: int, batch: int
) -> Callable[..., Tensor]:
    """A hook that patches the features of what it sees.

    Args:
        basis: the point in the basis.
        jobs: the patches.
        start: the first position that runs.
        before, batch: as for `_patching`.
    """
    view = basis.view
    assert isinstance(view, InBasis)

    def patch(activation: Tensor, hook: HookPoint) -> Tensor:
        own = activation[before : before + batch]
        old = dense(view.encode(own))
        kept = view.decoded(old, own)
        new = activation.clone()
        places, rows = [], []
        for number, job in enumerate(jobs):
            features = old.clone()
            made = job.patch(start)(features)
            features = features if made is None else made
            if job.changed is None:
                where = (features != old).flatten(2).any(-1)
            else:
                where = torch.zeros(own.shape[:2], dtype=torch.bool, device=own.device)
                where[:, [position - start for position in job.changed]] = True
            changed = where.nonzero(as_tuple=True)
            places.append((changed[0] + before + number * batch, changed[0], changed[1]))
            rows.append(features[changed])
        into, row, position = (torch.cat(parts) for parts in zip(*places, strict=True))
        if len(into):  # only what changed is decoded, in rows of as many positions as there are
            n, length = len(into), own.shape[1]
            filler = old.new_zeros(-n % length, *old.shape[2:])
            packed = torch.cat([*rows, filler]).unflatten(0, (-1, length))
            found = view.decoded(packed, own[:1].expand(len(packed), *own.shape[1:])).flatten(0, 1)[:n]
            new[into, position] += found - kept[row, position]
        return new

    return patch


class _Ends:
    """The ends of patched runs, and their logits where they are asked for.

    Args:
        run: the corrupted run.
        rows: the residual stream after the last block, ``[patch * batch, pos, d_model]``, or before it.
        start: the position that the rows start at.
        before_last: whether it is before it.
    """

    def __init__(self, run: CorruptedRun, rows: Tensor, start: int, before_last: bool) -> None:
        self.run, self.rows, self.start, self.before_last = run, rows, start, before_last
        self._begin = rows.shape[1] if before_last else 0
        self._after = rows
        self._found: dict[tuple[int, ...], tuple[int, Tensor]] = {}

    def logits(self, number: int) -> LazyLogits:
        """The logits of one patch."""
        return lazy(self._of(number), self.run.logits.shape, self.run.logits)

    def _of(self, number: int) -> LogitsAt:
        return lambda positions: self._at(number, positions)

    def _at(self, number: int, positions: list[int]) -> Tensor:
        later = [place for place, position in enumerate(positions) if position >= self.start]
        wanted = tuple(positions[place] - self.start for place in later)
        if not wanted:
            return self.run.logits[:, positions]
        new = self._new(number, wanted)
        if len(wanted) == len(positions):
            return new.clone()  # what a metric does to its logits is its own
        whole = self.run.logits[:, positions]
        whole[:, later] = new
        return whole

    def _new(self, number: int, wanted: tuple[int, ...]) -> Tensor:
        """One patch's logits at some of the positions that ran, computed with those of neighbouring patches."""
        batch, d_vocab = self.run.batch, self.run.logits.shape[-1]
        patches = len(self.rows) // batch
        ends = self._ends(min(wanted))
        columns = [column - self._begin for column in wanted]
        if wanted not in self._found and len(self._found) == MOST_KEPT:
            return self.run.logits_of(ends[number * batch : (number + 1) * batch, columns])
        most = max(1, MOST_LOGITS // (batch * len(wanted) * d_vocab))
        together = -(-patches // -(-patches // most))  # parts of one size
        part, within = divmod(number, together)
        if self._found.get(wanted, (-1,))[0] != part:
            rows = ends[part * together * batch : (part + 1) * together * batch]
            self._found[wanted] = part, self.run.logits_of(rows[:, columns])
        return self._found[wanted][1][within * batch : (within + 1) * batch]

    def _ends(self, begin: int) -> Tensor:
        """The stream after the last block, from this column on or an earlier one, which is then `_begin`."""
        if begin < self._begin:
            # A metric that looks farther to the front once may do so again: then it is all of them.
            self._begin = begin if self._begin == self.rows.shape[1] else 0
            self._after = self.run.last_block(self.rows, self.start, self._begin)
        return self._after


# ----------------------------------------------------------------------------------------------------------------------
# The metric of each patch, by a sweep where that gives what whole runs give, by one run for each where not.
# ----------------------------------------------------------------------------------------------------------------------


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
        self.possible = (
            self.run.by_position and self._without_gradients() and all(by_row(hook, read) for hook, read in bases)
        )
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


# ----------------------------------------------------------------------------------------------------------------------
# A sweep of patches through one compiled program: each row of a batch says at which layer its activation is other.
# ----------------------------------------------------------------------------------------------------------------------


#: How `torch.compile` is told to compile.
Options = Mapping[str, object]


def compiled_sweep(patches: Patches, patches_per_run: int | None, options: Options) -> list[Tensor]:
    """The metric of each patch.

    Each patched activation is made from the corrupted run's, which a run with one patch has at that place. The program
    puts it in at its layer; it computes all layers of every patch, without the run's machinery between them.

    Args:
        patches: the patches.
        patches_per_run: how many patches are one batch; None: as many as a quarter of the free memory holds.
        options: of `torch.compile`.

    Raises:
        ValueError: the activations have no batch axis, or other shapes in other layers; or a basis mixes rows.
    """
    model, tokens, steps, attention_mask = patches.model, patches.tokens, patches.steps, patches.attention_mask
    hooks, batch = patches.hooks, len(tokens)
    names = [hook.name for hook in hooks]
    given = {} if attention_mask is None else {"attention_mask": attention_mask}
    if mixed := mixing_rows(patches):
        raise ValueError(
            f"the basis of {mixed[0]} mixes the rows of a batch, which are patches here: use compiled=False"
        )
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=attention_mask)
        shapes = {tuple(cache[name].shape) for name in names}
        if len(shapes) > 1 or not all(hook.point.axes.startswith("batch") for hook in hooks):
            raise ValueError(
                f"a compiled sweep needs activations of one shape with a batch axis; those at {names[0]} and elsewhere "
                f"have {sorted(shapes)}: use compiled=False"
            )
        of_a_run = tokens_per_run(model.cfg, tokens.device, tokens.shape[1], logits.element_size())
        most = patches_per_run or max(1, of_a_run // tokens.numel())
        most = min(most, len(steps))
        layers = {name: number for number, name in enumerate(names)}

        def put(activation: Tensor, hook: HookPoint, value: Tensor, place: Tensor) -> Tensor:
            here = (place == layers[hook.name]).view(-1, *[1] * (activation.ndim - 1))
            return torch.where(here, value.to(activation), activation)

        example = {
            "value": cache[names[0]].repeat_interleave(most, 0),
            "place": torch.zeros(most * batch, dtype=torch.long),
        }
        program = model.program(interventions=[(names, put)], inputs=example).compile(**options)
        rows = {name: tensor.repeat(most, 1) for name, tensor in {"input_ids": tokens, **given}.items()}
        found: list[Tensor] = []
        for at in range(0, len(steps), most):
            some = list(steps[at : at + most])
            some += [some[-1]] * (most - len(some))  # as many rows each time: nothing is compiled again
            value = torch.cat([_patched(step, cache[step.hook.name]) for step in some])
            place = torch.tensor([layers[step.hook.name] for step in some], device=tokens.device)
            made = program(**rows, value=value, place=place.repeat_interleave(batch))["logits"]
            found += [patches.metric(part) for part in made.split(batch)[: len(steps) - at]]
            patches.report(min(most, len(steps) - at))
    return found


def _patched(step: PatchStep, corrupted: Tensor) -> Tensor:
    """The activation with the patch in it."""
    activation = corrupted.clone()
    made = step.whole(activation)
    return activation if made is None else made
