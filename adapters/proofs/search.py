"""What of an inferred declaration holds on the live model: a search over checks. What does not is left out by name.

Points are tried together, and apart only where that fails: a model of some thousand points takes some dozen runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adapters.attention import Attention
from adapters.inputs.made import Given, sample_inputs, split
from adapters.observe.errors import WRONG, one_line
from adapters.observe.modes import evaluating, outside_of_modes
from adapters.observe.progress import ProgressBar, progress
from adapters.observe.tolerance import tolerance
from adapters.proofs.edits import Edits
from adapters.proofs.evidence import places_of
from adapters.proofs.mechanics import Mechanics, Test
from adapters.proofs.protocol import Bridge, Hook


class Proof:
    """What holds of an inferred declaration.

    Args:
        bridge: a bridge with all points that were inferred.
        inputs: images or sound that its model needs, by the names of its own arguments; None: made up.

    Attributes:
        not_offered: the hook points that do not hold, and why.
        no_layer_runs: why a run cannot start at a layer; "" where it can.
    """

    def __init__(self, bridge: Bridge, inputs: Given | None = None) -> None:
        self.bridge = bridge
        self.arguments = sample_inputs(bridge.core, inputs)
        self.tokens, self.inputs = split(bridge.core, self.arguments)
        self.not_offered: dict[str, str] = {}
        self.no_layer_runs = bridge.no_layer_runs
        self._progress = ProgressBar()

    def run(self) -> Proof:
        """Tries everything. The model's mode is evaluation meanwhile."""
        model = self.bridge.original_model
        with outside_of_modes(model), evaluating(model), torch.no_grad(), progress("proving") as self._progress:
            self._progress("the model itself", 0)
            self.mechanics = Mechanics(self.bridge, self.tokens, self.inputs, tolerance(self.bridge.cfg.dtype))
            self._progress.grow(len(self.mechanics.names))
            self.mechanics.run_plain()  # before any hook is there: BigBird chooses its attention in its first run
            for what, test in (
                ("hook points are seen", self._shown),
                ("and kept, of a short run", self._kept_of_few),
                ("what is read is written back", self.mechanics.written_back),
            ):
                self._progress(what, 0)
                self._leave_out(test)
            if not self.no_layer_runs:
                self._progress("runs of some layers", 0)
                self.no_layer_runs = self._why_no_layer_runs()
            self._leave_out(self._edited)
        return self

    def _leave_out(self, test: Test) -> None:
        """Leaves out what a test does not hold of."""
        failed = self.mechanics.failing(self.mechanics.names, test)
        self.not_offered |= failed
        self.mechanics.names = [name for name in self.mechanics.names if name not in failed]

    def _shown(self, names: list[str]) -> dict[str, str]:
        """Each is seen once."""
        return self.mechanics.seen_once(names)

    def _kept_of_few(self, names: list[str]) -> dict[str, str]:
        """Each is seen in a short run, too: what some lengths leave out is no place that is there in every run.

        A cache keeps it.
        """
        names = [name for name in names if name not in self.mechanics.idle]
        short = self._cut(lambda length: length // 2)
        if short is None:  # images: what each head has would take gigabytes
            points = {name: self.bridge.hook_dict[name].point for name in names}
            self.mechanics.cache([name for name, each in points.items() if each.group != "heavy" or not each.depth])
            return {}
        seen: set[str] = set()

        def look(x: Tensor, hook: Hook) -> None:
            seen.add(hook.name)

        tokens, more = split(self.bridge.core, short)
        self.bridge.run_with_hooks(tokens, fwd_hooks=[(names, look)], **more)
        self.bridge.run_with_cache(tokens, names_filter=[name for name in names if name in seen], **more)
        left = [name for name in names if name not in seen and ".experts." not in name]
        return dict.fromkeys(left, "it is not seen in a run of few tokens")

    def _cut(self, to: Callable[[int], int]) -> Given | None:
        """Shorter texts; None where the model does not run on them.

        Images and sound have the size that they have: with them, no other run is made.
        """
        if any(x.is_floating_point() or x.ndim != 2 for x in self.arguments.values()):
            return None
        short = {name: x[:, : to(x.shape[1])] for name, x in self.arguments.items()}
        tokens, more = split(self.bridge.core, short)
        try:
            self.bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
        except WRONG as error:  # the model itself takes no such text
            one_line(error)
            return None
        return short

    def _edited(self, names: list[str]) -> dict[str, str]:
        """An edit at one point, in one row of the batch, changes that row of the logits."""
        rows_of = [name for name in names if self.bridge.hook_dict[name].point.axes.startswith("batch ")]
        only_choose = self._auxiliary() | {"embed.hook_in"}
        edited = [name for name in rows_of if name not in only_choose and "hook_expert_indices" not in name]
        few = self._cut(lambda length: min(length, 3)) or self.arguments
        return Edits(self.bridge, few, self.arguments, not self.no_layer_runs, self._progress).without_effect(edited)

    def _auxiliary(self) -> set[str]:
        """The hook points of what attention has besides: an indexer chooses keys, and of a short text it takes all."""
        return {
            f"{place.part}{path}.hook_out"
            for place in places_of(self.bridge)
            if isinstance(part := place.named.step.part, Attention)
            for path, _ in part.auxiliary_modules
        }

    def _why_no_layer_runs(self) -> str:
        """Why a run that starts at a layer with what another stopped at gives other logits; "" where it does not."""
        try:
            for layer, logits, whole in self.mechanics.layer_runs():
                if not self.mechanics.close(logits, whole)[0]:
                    return f"a run that starts at {layer} gives other logits: blocks are given more"
        except WRONG as error:
            return f"its blocks cannot be run by themselves ({one_line(error)})"
        return ""
