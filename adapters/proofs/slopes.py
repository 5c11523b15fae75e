"""The gradient at a hook point is the slope of an edit there: what a function of a model moves by, edit by edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adapters.inputs import arguments_of, repeated, split
from adapters.observe.observe import WRONG, one_line
from adapters.proofs.evidence import Bridge, Findings, Hook, HookFunction, few_tokens
from adapters.views import Kwargs

SLOPES = "the gradient at a hook point is the slope of an edit there"

#: How large an edit is, relative to the activation; one that does not agree is tried smaller: kinks, and experts that
#: are chosen by what is largest, have a slope on one side each.
_SIZES = (2e-3, 4e-4, 1e-4)
#: What a slope may differ by from what the gradient says, relative to that.
_NEAR = 0.1
#: How many rows are in one run at most.
_ROWS = 12
#: Edits are tried together in so many groups at least, each of so many points at most, of which none moves the logits
#: by so many times as much as another: what is wrong of one would be lost among what others are rounded by.
_GROUPS, _TOGETHER, _ALIKE = 6, 127, 4
#: How many times the last digit of a logit a sum of them may be off by.
_ROUNDED = 30
#: What stands for infinity.
_LARGE = 1e20
#: Those that choose (experts, tokens) have no slope; states refuse to have one (see `adapters.mixers`).
_CHOOSE = ("hook_expert_indices", "embed.hook_in")


class Slopes:
    """Edits at many points at once, each of a size that its gradient says moves the sum of logits as much as others.

    Edits add up: where they do not move it as far as all gradients say, they are tried apart.

    Args:
        bridge: the bridge.
        names: its hook points; those that have no slope are left out.
        given: what to run, the input and what goes with it: few, as runs have many rows. The first row is edited.
        findings: what is found is added to it.
        step: each how-many-th token's logits are looked at.

    Attributes:
        moved: those of which it was seen that an edit moves the logits.
    """

    def __init__(
        self, bridge: Bridge, names: Sequence[str], given: tuple[Tensor, dict[str, Tensor]], findings: Findings,
        step: int,
    ) -> None:  # fmt: skip
        self.bridge, self.names, self.findings, self.step = bridge, names, findings, step
        arguments = arguments_of(bridge.core, *given)
        rows = {len(x) if x.ndim else 0 for x in arguments.values()}  # patches of images are no rows
        self.given = {name: x[:1] for name, x in arguments.items()} if len(rows) == 1 and rows != {0} else arguments
        self.moved: set[str] = set()
        self._gradients: dict[str, Tensor] = {}
        self._activations: dict[str, Tensor] = {}

    def prove(self) -> None:
        """Looks at all of them."""
        self.findings.claim(SLOPES)
        with few_tokens(self.bridge, self.step):
            self._prove_rows()

    def _prove_rows(self) -> None:
        points = {name: self.bridge.hook_dict[name].point for name in self.names}
        rows = [
            name for name, each in points.items()
            if each.axes.startswith("batch ") and not name.endswith(_CHOOSE) and each.site.key != "state"
        ]  # fmt: skip
        # A run may edit the inputs of heads, or the norm that they read through, not both.
        for some in ([x for x in rows if points[x].group != "heavy"], [x for x in rows if points[x].group == "heavy"]):
            if some:
                self._prove(some)

    def _prove(self, names: list[str]) -> None:
        try:
            self._look(names)
        except WRONG as error:
            if not (why := self._why_no_gradient()):
                raise
            one_line(error)
            self.findings.inconclusive(SLOPES, f"the model itself has no gradient: {why}")
            return
        with torch.no_grad():
            looked = [name for name in names if name in self._activations]
            numbers = [name for name in looked if self._is_number(name)]
            for name in looked:
                if name not in numbers:
                    self.findings.inconclusive(SLOPES, f"the gradient at {name} is no number")
            alone = self._apart(self._alike(numbers))
            for start in range(0, len(alone), _ROWS):
                self._alone(alone[start : start + _ROWS])

    def _alike(self, names: list[str]) -> list[Sequence[str]]:
        """Groups of those of which an edit in the first row moves it by about as much; by nothing, in two of them."""
        moves = {name: self._moves(name) for name in names}
        moved = sorted((name for name in names if moves[name]), key=lambda name: moves[name])
        most = max(1, min(_TOGETHER, len(moved) // _GROUPS))
        groups: list[list[str]] = []
        for name in moved:
            if not groups or len(groups[-1]) >= most or moves[name] > _ALIKE * moves[groups[-1][0]]:
                groups.append([])
            groups[-1].append(name)
        return [*groups, *_shared_out([name for name in names if not moves[name]], 2)]

    def _apart(self, groups: list[Sequence[str]]) -> list[Sequence[str]]:
        """Those that are off by themselves: of a group that is, each is tried. (In smaller ones errors may cancel.)"""
        alone: list[Sequence[str]] = []
        while groups:
            some, groups = groups[:_ROWS], groups[_ROWS:]
            for group, (off, told) in zip(some, self._off(some, _SIZES[0]), strict=True):
                if off:
                    parts = _shared_out(group, len(group))
                    groups, alone = (groups + parts, alone) if len(group) > 1 else (groups, alone + parts)
                    continue
                self.moved |= set(group) if told else set()
                for name in group:
                    self.findings.holds(SLOPES, name, True)
        return alone

    def _alone(self, points: Sequence[Sequence[str]]) -> None:
        tried = [self._off(points, size) for size in _SIZES]
        for (name,), *found in zip(points, *tried, strict=True):
            sized = [off for off, told in found if off or told]  # of some sizes nothing is seen
            wrong = bool(sized) and all(sized)
            alike = wrong and max(sized) - min(sized) <= 2 * _NEAR * max(map(abs, sized))
            if wrong and not alike:
                self.findings.inconclusive(SLOPES, f"{name} has no slope")
            elif found[0][1] and not alike:
                self.moved.add(name)
            moved = f"an edit moves the logits by {1 + sized[-1]:.2g} of what it says" if sized else ""
            self.findings.holds(SLOPES, name, not alike, moved if self._moves(name) else "it is zero")

    def _look(self, names: Sequence[str]) -> None:
        """The activations, and their gradients; where nothing before a point wants one, neither does that."""
        kept: list[GradientEdge] = []

        def keep(x: Tensor, hook: Hook) -> None:
            if x.requires_grad:
                self._activations[hook.name] = x.detach().clone()
                kept.append(get_gradient_edge(x))  # what is added to it in place comes behind

        def add(gradient: Tensor, hook: Hook) -> None:
            before = self._gradients.get(hook.name)
            self._gradients[hook.name] = gradient.clone() if before is None else before + gradient

        tokens, more = split(self.bridge.core, self.given)
        read, asked = [(list(names), keep)], [(list(names), add)]
        with torch.enable_grad(), self.bridge.hooks(fwd_hooks=read, bwd_hooks=asked):
            total = self._sum(self.bridge(tokens, **Kwargs(more))).sum()
            if kept and total.requires_grad:  # no gradient of a parameter is made
                torch.autograd.grad(total, kept, allow_unused=True)

    def _why_no_gradient(self) -> str:
        """Why the model has none without hooks, as far as its first parameter; "" where it has one."""
        tokens, more = split(self.bridge.core, self.given)
        first = next((p for p in self.bridge.original_model.parameters() if p.requires_grad), None)
        try:
            with torch.enable_grad():
                total = self._sum(self.bridge(tokens, **Kwargs(more))).sum()
                if first is not None and total.requires_grad:
                    torch.autograd.grad(total, first, allow_unused=True)
        except WRONG as error:
            return one_line(error)
        return ""

    def _sum(self, logits: Tensor) -> Tensor:
        """What is made of each row of what the model returns."""
        weights = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        rows = logits.double()
        return (rows.where(rows.abs() < _LARGE, 0) * weights.to(rows.device)).flatten(1).sum(-1)

    def _direction(self, name: str) -> Tensor:
        """Where a point is moved to: along its gradient, and anywhere.

        Each vector moves by its own size: the stream of a trained model is a thousand times larger at its first token.
        """
        x, gradient = self._activations[name][0], self._gradient(name)[0]
        there = torch.isfinite(x)
        size = x.where(there, 0).double().norm(dim=-1, keepdim=True)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(x.device)
        found = _unit(noise * there) + _unit(gradient.double() * there)
        return found * size

    def _gradient(self, name: str) -> Tensor:
        return self._gradients.get(name, torch.zeros_like(self._activations[name]))

    def _is_number(self, name: str) -> bool:
        """Whether its gradient has numbers wherever it has."""
        gradient = self._gradient(name)[0]
        return bool(gradient[torch.isfinite(self._activations[name][0])].isfinite().all())

    def _moves(self, name: str) -> float:
        """What an edit of the size of the activation moves the sum by, as the gradient says."""
        return float((self._gradient(name)[0].double() * self._direction(name)).sum())

    def _off(self, groups: Sequence[Sequence[str]], size: float) -> list[tuple[float, bool]]:
        """For each group of edits, what the sum moves by besides what gradients say, relative to one; 0: nothing.

        And whether it is seen to move, edit by edit.

        Each group is two rows of one run: it is moved to both sides.
        """
        count = next(iter(self.given.values())).shape[0]
        edits: dict[str, tuple[int, Tensor]] = {}
        one: list[float] = []
        said: list[float] = []
        for row, group in enumerate(groups):
            moves = {name: self._moves(name) for name in group}
            one.append(size * min(moves.values()) / len(group) ** 0.5)
            said.append(0.0)
            # To both sides, and not alike: what is wrong at several points does not cancel.
            shares = torch.rand(len(group), generator=torch.Generator().manual_seed(4)).tolist()
            for place, (name, move) in enumerate(moves.items()):
                share = (1 + shares[place]) * (-1) ** place
                edits[name] = (row * count, self._direction(name) * (one[row] / move if one[row] else size) * share)
                said[row] += one[row] * share
        tokens, more = split(self.bridge.core, repeated(self.given, 2 * len(groups)))
        hooks = [(list(edits), _adding(edits, len(groups) * count))]
        both = self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)[::count]
        up, down = both.split(len(groups))
        # What the last digits of the logits make of the sum.
        sizes = up.double().where(up.abs() < _LARGE, 0).flatten(1).norm(dim=-1).tolist()
        found = []
        for row, moved in enumerate(((self._sum(up) - self._sum(down)) / 2).tolist()):
            differs = moved - said[row]
            rounding = _ROUNDED * torch.finfo(up.dtype).eps * sizes[row]
            off = abs(differs) > _NEAR * one[row] + rounding
            found.append((differs / (one[row] or size) if off else 0.0, one[row] > rounding))
        return found


def _shared_out(names: Sequence[str], among: int) -> list[Sequence[str]]:
    ends = [row * len(names) // among for row in range(among + 1)]
    return [names[start:end] for start, end in pairwise(ends) if start < end]


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def _adding(edits: Mapping[str, tuple[int, Tensor]], apart: int) -> HookFunction:
    def edit(x: Tensor, hook: Hook) -> Tensor:
        row, direction = edits[hook.name]
        y = x.clone()
        y[row] = x[row] + direction.to(x)
        y[row + apart] = x[row + apart] - direction.to(x)
        return y

    return edit
