"""Proof that the gradient at a hook point predicts the effect of an edit there: a comparison with
finite differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adapters.inputs import arguments_of, repeated, split
from adapters.linear import runs_its_class
from adapters.observe.observe import WRONG, Calls, one_line
from adapters.observe.recognised import show_check
from adapters.proofs.evidence import Bridge, Findings, Hook, HookFunction, few_tokens
from adapters.views import Kwargs

SLOPES = "the gradient at a hook point predicts the effect of an edit there"

#: Sizes of an edit, relative to the activation. If one does not agree, a smaller one is tried:
#: kinks and the selection of experts have different slopes on each side.
_SIZES = (2e-3, 4e-4, 1e-4)
#: Maximum difference between a slope and the gradient, relative to the gradient.
_NEAR = 0.1
#: Maximum number of rows in a run.
_ROWS = 12
#: Edits are combined: minimum number of groups, maximum number of points in a group, and maximum
#: ratio of their effects on the logits. A wrong gradient would be lost in the rounding errors of
#: larger effects.
_GROUPS = 6
_TOGETHER = 127
_ALIKE = 4
#: Maximum rounding error of a sum of logits, in units of a logit's last digit.
_ROUNDED = 30
#: Values at least this large count as infinity.
_LARGE = 1e20
#: Points that select (experts, tokens) have no slope; states raise an error (see
#: `adapters.mixers`).
_CHOOSE = ("hook_expert_indices", "embed.hook_in")


class Slopes:
    """Finite differences at many points at once; each edit has a size at which its gradient
    predicts a similar change of the sum of logits.

    Edits add up: if their sum differs from the prediction of the gradients, they are tested
    separately.

    Args:
        bridge: the bridge.
        names: its hook points; those without a slope are skipped.
        inputs: the input and the model's other inputs; use few rows, because runs have many. The
            first row is edited.
        findings: collects the results.
        step: only every `step`-th vocabulary entry's logits are compared.

    Attributes:
        moved: the hook points whose edit was observed to change the logits.
    """

    def __init__(
        self,
        bridge: Bridge,
        names: Sequence[str],
        inputs: tuple[Tensor, dict[str, Tensor]],
        findings: Findings,
        step: int,
    ) -> None:
        self.bridge = bridge
        self.names = names
        self.findings = findings
        self.step = step
        self.arguments = arguments_of(bridge.core, *inputs)
        lengths = {len(x) if x.ndim else 0 for x in self.arguments.values()}
        if len(lengths) == 1 and lengths != {0}:  # patches of images are not rows
            self.arguments = {name: x[:1] for name, x in self.arguments.items()}
        self.moved: set[str] = set()
        self._gradients: dict[str, Tensor] = {}
        self._activations: dict[str, Tensor] = {}

    def prove(self) -> None:
        """Check all hook points."""
        self.findings.claim(SLOPES)
        light: list[str] = []
        heavy: list[str] = []
        for name in self.names:
            point = self.bridge.hook_dict[name].point
            has_rows = point.axes.startswith("batch ") and point.site.key != "state"
            if has_rows and not name.endswith(_CHOOSE):
                (heavy if point.group == "heavy" else light).append(name)
        with few_tokens(self.bridge, self.step):
            # A run may edit the inputs of heads, or the norm before them, but not both.
            for names in (light, heavy):
                if names:
                    self._prove(names)

    def _prove(self, names: list[str]) -> None:
        """Compare the gradients at some hook points with differences."""
        try:
            self._record(names)
        except WRONG as error:
            why = self._why_no_gradient()
            if not why:
                raise
            one_line(error)
            self.findings.inconclusive(SLOPES, f"the model itself has no gradient: {why}")
            return
        numbers: list[str] = []
        with torch.no_grad():
            for name in names:
                if name not in self._activations:
                    continue
                if self._is_number(name):
                    numbers.append(name)
                else:
                    self.findings.inconclusive(SLOPES, f"the gradient at {name} is no number")
            alone = self._prove_groups(self._groups(numbers))
            for start in range(0, len(alone), _ROWS):
                self._prove_alone(alone[start : start + _ROWS])

    # ----------------------------------------------------------------------------------------------
    # Gradients, and what they predict for an edit.
    # ----------------------------------------------------------------------------------------------

    def _record(self, names: Sequence[str]) -> None:
        """Record the activations and their gradients. A point has none if nothing before it
        requires a gradient.
        """
        edges: list[GradientEdge] = []

        def keep(x: Tensor, hook: Hook) -> None:
            if x.requires_grad:
                self._activations[hook.name] = x.detach().clone()
                edges.append(get_gradient_edge(x))  # the edge precedes later in-place additions

        def add(gradient: Tensor, hook: Hook) -> None:
            before = self._gradients.get(hook.name)
            self._gradients[hook.name] = gradient.clone() if before is None else before + gradient

        forward = [(list(names), keep)]
        backward = [(list(names), add)]
        with torch.enable_grad(), self.bridge.hooks(fwd_hooks=forward, bwd_hooks=backward):
            total = self._total()
            if edges and total.requires_grad:  # skip the gradients of parameters
                torch.autograd.grad(total, edges, allow_unused=True)

    def _why_no_gradient(self) -> str:
        """Return why no gradient reaches the model's first parameter without hooks; "" if one
        does."""
        parameters = self.bridge.original_model.parameters()
        first = next((parameter for parameter in parameters if parameter.requires_grad), None)
        try:
            with torch.enable_grad():
                total = self._total()
                if first is not None and total.requires_grad:
                    torch.autograd.grad(total, first, allow_unused=True)
        except WRONG as error:
            return one_line(error)
        return ""

    def _total(self) -> Tensor:
        """Run the model; return a random weighted sum of all logits."""
        tokens, more = split(self.bridge.core, self.arguments)
        return self._sum(self.bridge(tokens, **Kwargs(more))).sum()

    def _sum(self, logits: Tensor) -> Tensor:
        """Return a random weighted sum of the logits for each row."""
        weights = _noise(logits.shape[1:], 2).to(logits.device)
        return (_finite(logits) * weights).flatten(1).sum(-1)

    def _gradient(self, name: str) -> Tensor:
        """Return the gradient in the first row; zero if there is none."""
        gradient = self._gradients.get(name)
        return torch.zeros_like(self._activations[name][0]) if gradient is None else gradient[0]

    def _direction(self, name: str) -> Tensor:
        """Return the direction of an edit: along the gradient, plus a random direction.

        Each vector moves in proportion to its own norm: in trained models, the stream at the first
        token can be a thousand times larger than elsewhere.
        """
        x = self._activations[name][0]
        finite = torch.isfinite(x)
        size = x.where(finite, 0).double().norm(dim=-1, keepdim=True)
        noise = _noise(x.shape, 3).to(x.device)
        gradient = self._gradient(name).double()
        direction = _unit(noise * finite) + _unit(gradient * finite)
        return direction * size

    def _is_number(self, name: str) -> bool:
        """Tell whether the gradient is finite wherever the activation is."""
        finite = torch.isfinite(self._activations[name][0])
        return bool(self._gradient(name)[finite].isfinite().all())

    def _effect(self, name: str) -> float:
        """Return the change of the sum predicted by the gradient for an edit as large as the
        activation.
        """
        return float((self._gradient(name).double() * self._direction(name)).sum())

    # ----------------------------------------------------------------------------------------------
    # Edits of groups of points; of each point alone, where its group differs.
    # ----------------------------------------------------------------------------------------------

    def _groups(self, names: list[str]) -> list[Sequence[str]]:
        """Return groups of hook points whose edits in the first row have similarly large effects;
        points without an effect form two groups.
        """
        effects = {name: self._effect(name) for name in names}
        moved = sorted((name for name in names if effects[name]), key=effects.__getitem__)
        most = max(1, min(_TOGETHER, len(moved) // _GROUPS))
        groups: list[list[str]] = []
        for name in moved:
            last = groups[-1] if groups else []
            fits = bool(last) and len(last) < most
            if fits and effects[name] <= _ALIKE * effects[last[0]]:
                last.append(name)
            else:
                groups.append([name])
        still = [name for name in names if not effects[name]]
        return [*groups, *_shared_out(still, 2)]

    def _prove_groups(self, groups: list[Sequence[str]]) -> list[Sequence[str]]:
        """Test groups of hook points; if a group's slope differs from its gradient, return all its
        points, to be tested one by one. (In smaller groups, errors may still cancel.)
        """
        alone: list[Sequence[str]] = []
        while groups:
            some = groups[:_ROWS]
            groups = groups[_ROWS:]
            show_check(f"{SLOPES}, {len(groups)} groups of edits left", 0)
            results = self._edit(some, _SIZES[0])
            for group, (difference, visible) in zip(some, results, strict=True):
                if difference:
                    rest = groups if len(group) > 1 else alone
                    rest += _shared_out(group, len(group))
                    continue
                if visible:
                    self.moved.update(group)
                for name in group:
                    self.findings.holds(SLOPES, name, True)
        return alone

    def _prove_alone(self, points: Sequence[Sequence[str]]) -> None:
        """Check hook points with edits of several sizes, one point in each edit."""
        show_check(f"{SLOPES}, {points[0][0]} and others alone", 0)
        sizes = [self._edit(points, size) for size in _SIZES]
        for (name,), *results in zip(points, *sizes, strict=True):
            # Some sizes have no visible effect.
            differences = [off for off, visible in results if off or visible]
            differs = bool(differences) and all(differences)
            wrong = False
            if differs:
                spread = max(differences) - min(differences)
                wrong = spread <= 2 * _NEAR * max(map(abs, differences))
            if differs and not wrong:
                self.findings.inconclusive(SLOPES, f"{name} has no slope")
            elif results[0][1] and not wrong:
                self.moved.add(name)
            detail = "it is zero"
            if self._effect(name):
                detail = ""
                if differences:
                    share = 1 + differences[-1]
                    detail = f"an edit changes the logits {share:.2g} times as much as predicted"
            self.findings.holds(SLOPES, name, not wrong, detail)

    def _edits_of(
        self, group: Sequence[str], size: float
    ) -> tuple[dict[str, Tensor], float, float]:
        """Return an edit for each point of a group, the size of their effects, and the predicted
        change of the sum.
        """
        effects = {name: self._effect(name) for name in group}
        unit = size * min(effects.values()) / len(group) ** 0.5
        edits: dict[str, Tensor] = {}
        total = 0.0
        # Use both signs and different sizes, so that errors at several points do not cancel.
        shares = torch.rand(
            len(group), generator=torch.Generator().manual_seed(4), device="cpu"
        ).tolist()
        for index, (name, effect) in enumerate(effects.items()):
            share = (1 + shares[index]) * (-1) ** index
            direction = self._direction(name) * (unit / effect if unit else size)
            edits[name] = direction * share
            total += unit * share
        return edits, unit, total

    def _edit(self, groups: Sequence[Sequence[str]], size: float) -> list[tuple[float, bool]]:
        """Return, for each group of edits, the relative difference between the observed and the
        predicted change of the sum (0: none), and whether the edits have a visible effect.

        Each group takes two rows of one run, with edits of opposite signs.
        """
        count = next(iter(self.arguments.values())).shape[0]
        edits: dict[str, tuple[int, Tensor]] = {}
        units: list[float] = []
        predicted: list[float] = []
        for row, group in enumerate(groups):
            directions, unit, total = self._edits_of(group, size)
            for name, direction in directions.items():
                edits[name] = (row * count, direction)
            units.append(unit)
            predicted.append(total)
        tokens, more = split(self.bridge.core, repeated(self.arguments, 2 * len(groups)))
        hooks = [(list(edits), _adding(edits, len(groups) * count))]
        logits = self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more)[::count]
        up, down = logits.split(len(groups))
        return self._compare(up, down, units, predicted, size)

    def _compare(
        self, up: Tensor, down: Tensor, units: list[float], predicted: list[float], size: float
    ) -> list[tuple[float, bool]]:
        """Compare the observed with the predicted changes of the sum; see `_edit`.

        Args:
            up, down: the logits with the edits and with their opposites.
            units: the size of each group's effects.
            predicted: the change of each group's sum.
            size: the size of the edits.
        """
        observed = ((self._sum(up) - self._sum(down)) / 2).tolist()
        # The effect of the logits' rounding on the sum.
        last_digit = torch.finfo(up.dtype).eps
        lengths = _finite(up).flatten(1).norm(dim=-1).tolist()
        results: list[tuple[float, bool]] = []
        for row, unit in enumerate(units):
            difference = observed[row] - predicted[row]
            rounding = _ROUNDED * last_digit * lengths[row]
            differs = abs(difference) > _NEAR * unit + rounding
            relative = difference / (unit or size) if differs else 0.0
            results.append((relative, unit > rounding))
        return results


def layers_without_slopes(calls: Calls) -> dict[str, str]:
    """Return the quantised layers whose gradient, as autograd computes it, is not the slope of
    their output, and why: they round their input, or give no gradient.

    Args:
        calls: the calls of a run.
    """
    reasons: dict[str, str] = {}
    for path, (call, *_) in calls.items():
        module, x = call.module, call.args[0] if len(call.args) == 1 else None
        if not hasattr(module, "in_features") or _is_of_floats(module):
            continue
        if isinstance(x, Tensor) and x.is_floating_point() and _differs_from_slope(module, x):
            kind = type(module).__name__
            reasons[path] = f"a {kind} whose gradient is not its slope: it rounds, or gives none"
    return reasons


def _is_of_floats(layer: nn.Module) -> bool:
    """Tell whether a layer's weight is a plain parameter, and no library has put another forward in
    the place of its class's.
    """
    weight = getattr(layer, "weight", None)
    is_plain = type(weight) is nn.Parameter and weight.is_floating_point() and weight.itemsize > 1
    return is_plain and runs_its_class(layer)


@torch.enable_grad()
def _differs_from_slope(module: nn.Module, x: Tensor) -> bool:
    """Tell whether a layer's gradient differs from a difference of its outputs."""
    x = x.detach().clone().requires_grad_()
    output: Any = module.forward(x)
    if not isinstance(output, Tensor):  # a router, which returns its choice, too
        return False
    weights = _noise(output.shape, 5).to(output)
    gradient: Tensor | None = None
    if output.requires_grad:
        (gradient,) = torch.autograd.grad((output * weights).sum(), x, allow_unused=True)
    if gradient is None:
        return True
    with torch.no_grad():
        edit = _noise(x.shape, 6).to(x) * x.abs().mean()
        change = (module.forward(x + edit) - module.forward(x - edit)) * weights / 2
        observed, predicted = _row_sums(change), _row_sums(gradient * edit)
        return not bool((observed - predicted).abs().sum() <= _NEAR * observed.abs().sum())


def _row_sums(x: Tensor) -> Tensor:
    return x.flatten(1).sum(-1)


def _shared_out(names: Sequence[str], among: int) -> list[Sequence[str]]:
    """Split names into a number of groups of similar length, omitting empty ones."""
    ends = [row * len(names) // among for row in range(among + 1)]
    return [names[start:end] for start, end in pairwise(ends) if start < end]


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return random numbers in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _finite(logits: Tensor) -> Tensor:
    """Return logits in double precision, with zeros in place of infinities."""
    return logits.double().where(logits.abs() < _LARGE, 0)


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length one."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def _adding(edits: Mapping[str, tuple[int, Tensor]], apart: int) -> HookFunction:
    """Return a function that adds each edit to its row, and subtracts it `apart` rows further
    down."""

    def edit(x: Tensor, hook: Hook) -> Tensor:
        row, direction = edits[hook.name]
        direction = direction.to(x)
        y = x.clone()
        y[row] = x[row] + direction
        y[row + apart] = x[row + apart] - direction
        return y

    return edit
