"""Whether an edit at a hook point changes what the model computes behind it: a batch row for each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adapters.inputs.made import Given, repeated, split
from adapters.mixers.part import Mixer
from adapters.observe.errors import WRONG, one_line
from adapters.proofs.protocol import Bridge, Hook, NamedHook
from adapters.views import Kwargs

#: So many rows are in one run at most; fewer where a block scans, of which each row may take gigabytes.
ROWS, ROWS_OF_SCANS = 48, 6
_PRE, _POST = ".hook_resid_pre", ".hook_resid_post"
#: Runs a number of rows with hooks, and returns what is compared, a row each.
Run = Callable[[int, Sequence[NamedHook]], Tensor]


class Edits:
    """Edits of one row each, compared bit by bit with the same run whose hooks write back what they read.

    Args:
        bridge: the bridge.
        few, whole: what is run, by the names of the model's own arguments: a short text where it takes one, and all.
        alone: a block can be run alone; else all run in one pass, each on what it is given without edits.
        step: told what was tried, and at how many points.
    """

    def __init__(self, bridge: Bridge, few: Given, whole: Given, alone: bool, step: Callable[[str, int], None]) -> None:
        self.bridge, self._few, self._whole, self._alone, self._step = bridge, few, whole, alone, step

    def without_effect(self, names: list[str]) -> dict[str, str]:
        """The hook points of which no edit changes anything, with the reason.

        One inside of a block has an effect where its edit changes what leaves the block, and an edit of what leaves
        that block changes the logits. All others, and those of which that is not seen, are tried to the logits.
        """
        ends = {name: end for name in names if (end := self._end(name)) in names and end != name}
        inside = self._inside(list(ends)) if self._alone else self._inside_together(list(ends))
        reached = self._reaching(self._few, [name for name in names if name not in inside])
        reached |= {name for name in inside if ends[name] in reached}
        reached |= self._reaching(self._whole, [name for name in names if name not in reached])
        return dict.fromkeys([name for name in names if name not in reached], "an edit changes nothing")

    def _end(self, name: str) -> str:
        """The hook point where the block ends that one is inside of; "" where that is no block of the first list."""
        depth = self.bridge.hook_dict[name].point.depth
        return f"blocks.{depth}.hook_resid_post" if name.startswith(f"blocks.{depth}.") else ""

    def _inside(self, names: list[str]) -> set[str]:
        """Those of which an edit changes what leaves their block."""
        found: set[str] = set()
        layers = [self.bridge.hook_dict[name].point.depth for name in names]
        if not layers:
            return found
        tokens, more = split(self.bridge.core, self._few)
        residual = self.bridge(tokens, stop_at_layer=0, **Kwargs(more))
        for layer in range(max(layers) + 1):
            here = [name for name, at in zip(names, layers, strict=True) if at == layer]

            def run(times: int, hooks: Sequence[NamedHook], stream: Tensor = residual, layer: int = layer) -> Tensor:
                _, more = split(self.bridge.core, repeated(self._few, times))
                with self.bridge.hooks(fwd_hooks=hooks):
                    rows = stream.repeat(times, *(1 for _ in stream.shape[1:]))
                    return self.bridge(rows, start_at_layer=layer, stop_at_layer=layer + 1, **more)

            try:
                found |= self._changed(here, run, f"block {layer}")
            except WRONG as error:
                one_line(error)  # this block does not run so: its points are tried in whole runs
            residual = run(1, [])
        return found

    def _inside_together(self, names: list[str]) -> set[str]:
        """The same where no block runs alone: one pass edits a point of every block, each given what it was without."""
        pres, posts = ([name for name in self.bridge.hook_dict if name.endswith(end)] for end in (_PRE, _POST))
        streams: dict[str, Tensor] = {}
        found: set[str] = set()

        def keep(x: Tensor, hook: Hook) -> None:
            streams[hook.name] = x.clone()

        def changed(some: list[str]) -> set[str]:
            """Those of which an edit changes its row of what leaves its block."""
            of_layers: dict[int, list[str]] = {}
            for name in some:
                of_layers.setdefault(self.bridge.hook_dict[name].point.depth, []).append(name)
            rows = {name: row for each in of_layers.values() for row, name in enumerate(each)}
            times = -(-max(map(len, of_layers.values())) // next(iter(self._few.values())).shape[0])
            tokens, more = split(self.bridge.core, repeated(self._few, times))
            seen: list[dict[str, list[float]]] = [{}, {}]

            def reset(x: Tensor, hook: Hook) -> Tensor:
                return streams[hook.name].repeat(times, *(1 for _ in x.shape[1:])).to(x)

            for made, edit in zip(seen, (_same, _edit_of(rows)), strict=True):

                def look(x: Tensor, hook: Hook, made: dict[str, list[float]] = made) -> None:
                    made[hook.name] = _digests(x)

                hooks: list[NamedHook] = [(pres, reset), (some, edit), (posts, look)]
                self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)
            plain, edited = seen
            return {name for name, row in rows.items() if edited[end := self._end(name)][row] != plain[end][row]}

        try:
            tokens, more = split(self.bridge.core, self._few)
            self.bridge.run_with_hooks(tokens, fwd_hooks=[(pres, keep)], **more)
            for some in filter(None, self._apart(names)):
                found |= (first := changed(some))
                hidden = [name for name in some if name not in first]
                found |= changed(hidden) if hidden else set()
                self._step("edits, all blocks", len(some))
        except WRONG as error:
            one_line(error)  # its points are tried in whole runs
        return found

    def _apart(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Those that each head has, which take the most memory, by themselves.

        A run may edit inputs of heads, or the norm that they read through, not both.
        """
        heavy = [name for name in names if self.bridge.hook_dict[name].point.group == "heavy"]
        return [name for name in names if name not in set(heavy)], heavy

    def _reaching(self, given: Given, names: list[str]) -> set[str]:
        """Those of which an edit changes the logits."""

        def run(times: int, hooks: Sequence[NamedHook]) -> Tensor:
            tokens, more = split(self.bridge.core, repeated(given, times))
            return self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)

        return self._changed(names, run, "logits")

    def _changed(self, names: list[str], run: Run, where: str) -> set[str]:
        """Those of which an edit changes its row of what a run returns."""
        found: set[str] = set()
        scans = any(isinstance(step.part, Mixer) and step.part.mixes for step in self.bridge.architecture.steps())
        rows = ROWS_OF_SCANS if scans else ROWS
        apart = self._apart(names)
        for some in (each[start : start + rows] for each in apart for start in range(0, len(each), rows)):
            changed = self._changed_together(some, run)
            # Where every reader of a tensor is edited by itself, an edit of the tensor reaches none of them.
            hidden = [name for name in some if name not in changed]
            found |= changed | (self._changed_together(hidden, run) if changed and hidden else set())
            self._step(f"edits, {where}", len(some))
        return found

    def _changed_together(self, names: list[str], run: Run) -> set[str]:
        times = -(-len(names) // next(iter(self._few.values())).shape[0])
        rows = {name: row for row, name in enumerate(names)}
        plain, edited = (run(times, [(names, hook)]) for hook in (_same, _edit_of(rows)))
        return {name for name, row in rows.items() if not torch.equal(edited[row], plain[row])}


def _digests(x: Tensor) -> list[float]:
    """A number for each row, another where any of its numbers is."""
    rows = x.detach().double().flatten(1)
    noise = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    return (rows @ noise.to(rows.device)).tolist()


def _same(x: Tensor, hook: Hook) -> Tensor:
    return x


def _edit_of(rows: dict[str, int]) -> Callable[[Tensor, Hook], Tensor]:
    def edit(x: Tensor, hook: Hook) -> Tensor:
        y, old = x.clone(), x[rows[hook.name]]
        # What is large becomes small, and the other way round: experts are chosen by what is largest.
        noise = (1.8 * torch.rand(old.shape, generator=torch.Generator().manual_seed(0)) - 0.9).to(x)
        y[rows[hook.name]] = torch.where(torch.isfinite(old), old * (1 + noise) + noise, old)
        return y

    return edit
