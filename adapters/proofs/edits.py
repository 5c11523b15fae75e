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
#: Runs a number of rows with hooks, and returns what is compared, a row each.
Run = Callable[[int, Sequence[NamedHook]], Tensor]


class Edits:
    """Edits of one row each, compared bit by bit with the same run whose hooks write back what they read.

    Args:
        bridge: the bridge.
        few, whole: what is run, by the names of the model's own arguments: a short text where it takes one, and all.
        n_layers: how many blocks can be run alone; 0: a run cannot start and stop at a layer.
        step: told what was tried, and at how many points.
    """

    def __init__(
        self, bridge: Bridge, few: Given, whole: Given, n_layers: int, step: Callable[[str, int], None]
    ) -> None:
        self.bridge, self._few, self._whole, self._n_layers, self._step = bridge, few, whole, n_layers, step

    def without_effect(self, names: list[str]) -> dict[str, str]:
        """The hook points of which no edit changes anything, with the reason.

        One inside of a block has an effect where its edit changes what leaves the block, and an edit of what leaves
        that block changes the logits. All others, and those of which that is not seen, are tried to the logits.
        """
        ends = {name: end for name in names if (end := self._end(name)) in names and end != name}
        inside = self._inside(list(ends))
        reached = self._reaching(self._few, [name for name in names if name not in inside])
        reached |= {name for name in inside if ends[name] in reached}
        reached |= self._reaching(self._whole, [name for name in names if name not in reached])
        return dict.fromkeys([name for name in names if name not in reached], "an edit changes nothing")

    def _end(self, name: str) -> str:
        """The hook point where the block ends that one is inside of; "" where no block with it can be run alone."""
        depth = self.bridge.hook_dict[name].point.depth
        return f"blocks.{depth}.hook_resid_post" if 0 <= depth < self._n_layers else ""

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
        # No run edits the norm before attention and the inputs of heads, which are normed without that edit.
        own = [
            name for name in names if self.bridge.hook_dict[name].point.flag in ("use_split_qkv_input", "use_attn_in")
        ]
        shared = [name for name in names if name not in own]
        for some in (them[start : start + rows] for them in (shared, own) for start in range(0, len(them), rows)):
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
