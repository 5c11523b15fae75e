"""What of an inferred declaration holds on the live model: a search over checks. What does not is left out by name.

Points are tried together, and apart only where that fails: a model of some thousand points takes some dozen runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.inputs.made import Given, repeated, sample_inputs, split
from adapters.observe.errors import WRONG, one_line
from adapters.observe.modes import evaluating, outside_of_modes
from adapters.observe.tolerance import tolerance
from adapters.proofs.mechanics import Mechanics
from adapters.proofs.protocol import Bridge, Hook, NamedHook


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

    def run(self) -> Proof:
        """Tries everything. The model's mode is evaluation meanwhile."""
        model = self.bridge.original_model
        with outside_of_modes(model), evaluating(model), torch.no_grad():
            self.mechanics = Mechanics(self.bridge, self.tokens, self.inputs, tolerance(self.bridge.cfg.dtype))
            for test in (self._shown, self._shown_of_few, self.mechanics.written_back, self._edited):
                failed = self.mechanics.failing(self.mechanics.names, test)
                self.not_offered |= failed
                self.mechanics.names = [name for name in self.mechanics.names if name not in failed]
            if not self.no_layer_runs:
                self.no_layer_runs = self._why_no_layer_runs()
        return self

    def _shown(self, names: list[str]) -> dict[str, str]:
        """Each is seen once, and a cache keeps it."""
        failed = self.mechanics.seen_once(names)
        if not failed:
            self.mechanics.cache(names)
        return failed

    def _shown_of_few(self, names: list[str]) -> dict[str, str]:
        """Each is seen in a short run, too: what some lengths leave out is no place that is there in every run.

        Images and sound have the size that they have: with them, no other run is made.
        """
        if any(x.is_floating_point() or x.ndim != 2 for x in self.arguments.values()):
            return {}
        seen: set[str] = set()

        def look(x: Tensor, hook: Hook) -> None:
            seen.add(hook.name)

        tokens, few = split(self.bridge.core, {name: x[:, : x.shape[1] // 2] for name, x in self.arguments.items()})
        try:
            self.bridge.run_with_hooks(tokens, fwd_hooks=[], **few)
        except WRONG as error:  # the model itself takes no such text
            one_line(error)
            return {}
        self.bridge.run_with_hooks(tokens, fwd_hooks=[(names, look)], **few)
        left = [name for name in names if name not in seen and ".experts." not in name]
        return dict.fromkeys(left, "it is not seen in a run of few tokens")

    def _repeated(self, hooks: Sequence[NamedHook], times: int) -> Tensor:
        """The logits of a run of the same rows so many times."""
        tokens, more = split(self.bridge.core, repeated(self.arguments, times))
        return self.bridge.run_with_hooks(tokens, fwd_hooks=list(hooks), **more)

    def _edited(self, names: list[str]) -> dict[str, str]:
        """An edit of one row of the batch, at one point each, changes that row of the logits."""
        failed: dict[str, str] = {}
        rows_of = [name for name in names if self.bridge.hook_dict[name].point.axes.startswith("batch ")]
        edited = [name for name in rows_of if name != "embed.hook_in" and "hook_expert_indices" not in name]
        for some in (edited[start : start + 48] for start in range(0, len(edited), 48)):
            times = -(-len(some) // self.tokens.shape[0])
            plain = self._repeated([], times)
            rows = {name: row for row, name in enumerate(some)}

            def edit(x: Tensor, hook: Hook, rows: dict[str, int] = rows) -> Tensor:
                y = x.clone()
                noise = torch.linspace(0.5, 1.4, x[0].numel()).cos().view(x.shape[1:]).to(x)
                row = rows[hook.name]
                y[row] = torch.where(torch.isfinite(x[row]), x[row] * (1 + noise), x[row])
                return y

            logits = self._repeated([(some, edit)], times)
            hidden = [name for name, row in rows.items() if torch.equal(logits[row], plain[row])]
            # Where every reader of a tensor is edited by itself, an edit of the tensor reaches none of them.
            again = self._repeated([(hidden, edit)], times) if hidden else plain
            failed |= {
                name: "an edit changes nothing" for name in hidden if torch.equal(again[rows[name]], plain[rows[name]])
            }
        return failed

    def _why_no_layer_runs(self) -> str:
        """Why a run that starts at a layer with what another stopped at gives other logits; "" where it does not."""
        try:
            for layer, logits, whole in self.mechanics.layer_runs():
                if not self.mechanics.close(logits, whole)[0]:
                    return f"a run that starts at {layer} gives other logits: blocks are given more"
        except WRONG as error:
            return f"its blocks cannot be run by themselves ({one_line(error)})"
        return ""
