"""Proof of an inferred declaration on the live model: what does not hold is left out by name.

Points are tried together, and apart only where that fails: a model of some thousand points takes some dozen runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from adapters.automatic.norms import tolerance
from adapters.inputs.made import Given, repeated, sample_inputs, split
from adapters.observe.errors import WRONG, one_line
from adapters.observe.modes import evaluating
from adapters.points import Point
from adapters.proofs.protocol import Bridge, Hook, NamedHook
from adapters.views import Kwargs


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
        #: How many positions the first stream has.
        self.pos = self.tokens.shape[1]
        self.not_offered: dict[str, str] = {}
        self.no_layer_runs = bridge.no_layer_runs

    def run(self) -> Proof:
        """Tries everything. The model's mode is evaluation meanwhile."""
        with evaluating(self.bridge.original_model), torch.no_grad():
            self.plain = self._logits([])
            names = self._each(list(self.bridge.hook_dict), self._shown)
            names = self._each(names, self._shown_of_few)
            names = self._each(names, self._written_back)
            self._each([name for name in names if self._has_rows(name)], self._edited)
            self._start_and_stop()
        return self

    def _logits(self, hooks: Sequence[NamedHook], times: int = 1) -> Tensor:
        """The logits of a run, of the same rows so many times."""
        tokens, more = split(self.bridge.core, repeated(self.arguments, times))
        return self.bridge.run_with_hooks(tokens, fwd_hooks=list(hooks), **more)

    def _point(self, name: str) -> Point:
        return self.bridge.hook_dict[name].point

    def _size(self, axis: str) -> int | None:
        """How long an axis is, None where the model does not say."""
        batch, pos = self.tokens.shape[0], self.pos
        known = {"batch": batch, "pos": pos, "key_pos": pos, "n_key_value_heads": self.bridge.cfg.n_kv_heads}
        if (decoder := self.inputs.get("decoder_input_ids")) is not None:
            known |= {"decoder_pos": decoder.shape[1], "decoder_key_pos": decoder.shape[1]}
        known["n_experts"] = self.bridge.cfg.num_experts or 0
        if axis.isdigit():
            return int(axis)
        return known[axis] if axis in known else getattr(self.bridge.cfg, axis, None)

    def _each(self, names: list[str], test: Callable[[list[str]], dict[str, str]]) -> list[str]:
        """Those for which a test holds; where it raises for several, these are tried apart."""
        pending, held = [names], []
        while pending:
            some = pending.pop(0)
            if not some:
                continue
            try:
                failed = test(some)
            except WRONG as error:
                why = one_line(error)
                if len(some) > 1:
                    pending = [some[: len(some) // 2], some[len(some) // 2 :], *pending]
                    continue
                failed = {some[0]: why}
            self.not_offered |= failed
            held += [name for name in some if name not in failed]
        return held

    def _shown(self, names: list[str]) -> dict[str, str]:
        """Each is seen once, with the shape that its axes say."""
        seen: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

        def look(x: Tensor, hook: Hook) -> None:
            seen[hook.name].append(tuple(x.shape))

        self._logits([(names, look)])
        first = next((shapes[0] for name, shapes in seen.items() if name.endswith("resid_pre") and shapes), None)
        if self.tokens.is_floating_point() and first is not None and len(first) > 1:
            self.pos = first[1]
        failed = {}
        for name, shapes in seen.items():
            axes = self._point(name).axes.split()
            if (
                not shapes and axes[0] == "row" and ".experts." in name
            ):  # an expert that is a module, to which none of these tokens was sent
                continue
            if len(shapes) != 1:
                failed[name] = f"it is seen {len(shapes)} times in a run"
            elif len(shapes[0]) != len(axes) or any(
                self._size(axis) not in (None, size) for axis, size in zip(axes, shapes[0], strict=True)
            ):
                failed[name] = f"its shape is {shapes[0]}, not [{' '.join(axes)}]"
        if not failed:  # what a cache keeps is what was there
            self.bridge.run_with_cache(self.tokens, names_filter=names, **self.inputs)
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

        tokens, few = (
            self.tokens[:, : self.pos // 2],
            {name: x[:, : x.shape[1] // 2] for name, x in self.inputs.items()},
        )
        try:
            self.bridge.run_with_hooks(tokens, fwd_hooks=[], **few)
        except WRONG as error:  # the model itself takes no such text
            one_line(error)
            return {}
        self.bridge.run_with_hooks(tokens, fwd_hooks=[(names, look)], **few)
        left = [name for name in names if name not in seen and ".experts." not in name]
        return dict.fromkeys(left, "it is not seen in a run of few tokens")

    def _written_back(self, names: list[str]) -> dict[str, str]:
        """Writing back what was read changes nothing.

        Raises:
            RuntimeError: it does, of several.
        """

        def same(x: Tensor, hook: Hook) -> Tensor:
            return x

        logits = self._logits([(names, same)])
        worst = float((logits - self.plain).abs().max())
        if worst <= 100 * tolerance(logits) * float(self.plain.abs().max()):
            return {}
        if len(names) > 1:
            raise RuntimeError("written back, they change the logits")
        return {names[0]: f"writing back what was read changes the logits by {worst:.1e}"}

    def _has_rows(self, name: str) -> bool:
        axes = self._point(name).axes
        return axes.startswith("batch ") and name not in ("embed.hook_in",) and "hook_expert_indices" not in name

    def _edited(self, names: list[str]) -> dict[str, str]:
        """An edit of one row of the batch, at one point each, changes that row of the logits."""
        failed: dict[str, str] = {}
        for some in _chunks(names, 48):
            times = -(-len(some) // self.tokens.shape[0])
            plain = self._logits([], times)
            rows = {name: row for row, name in enumerate(some)}

            def edit(x: Tensor, hook: Hook, rows: dict[str, int] = rows) -> Tensor:
                y = x.clone()
                noise = torch.linspace(0.5, 1.4, x[0].numel()).cos().view(x.shape[1:]).to(x)
                row = rows[hook.name]
                y[row] = torch.where(torch.isfinite(x[row]), x[row] * (1 + noise), x[row])
                return y

            logits = self._logits([(some, edit)], times)
            failed |= {
                name: "an edit changes nothing" for name, row in rows.items() if torch.equal(logits[row], plain[row])
            }
        return failed

    def _start_and_stop(self) -> None:
        """A run that starts at a layer with what another stopped at gives the same logits."""
        if self.bridge.no_layer_runs:
            return
        more = Kwargs(self.inputs)
        for layer in range(self.bridge.cfg.n_layers):
            try:
                residual = self.bridge(self.tokens, stop_at_layer=layer, **more)
                logits = self.bridge(residual, start_at_layer=layer, **more)
            except WRONG as error:
                self.no_layer_runs = f"its blocks cannot be run by themselves ({one_line(error)})"
                return
            other = logits.shape != self.plain.shape
            if other or float((logits - self.plain).abs().max()) > 10 * tolerance(logits) * float(
                self.plain.abs().max()
            ):
                self.no_layer_runs = f"a run that starts at layer {layer} gives other logits: blocks are given more"
                return


def _chunks(names: Sequence[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(names), size):
        yield list(names[start : start + size])
