"""Probes: linear readings of activations, aggregated over the tokens of a text."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bridge.arguments import check_choice, check_positive, shown, size_of
from bridge.hooks.hooks import HookPoint
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.interventions.operations import (
    POSITIONS,
    Condition,
    Number,
    Operation,
    SequencePart,
    TokenReadings,
    check_vectors,
    probe_readings,
    tokens_along,
    user_rows,
)

#: How a probe's readings of the tokens become one number per text.
AGGREGATIONS = ("last", "mean", "max", "multimax", "ema", "attention")
#: The name of the header in a probe's file.
_HEADER = "transformer_bridge_probe"
#: The number of random directions, and of shuffles of the labels, that a report averages over.
_DIRECTIONS, _SHUFFLES = 20, 5
#: A class needs one held-out row and two others.
_FEWEST = 3

Rows = Sequence[Tensor]
Array = NDArray[Any]


# --------------------------------------------------------------------------------------------------
# A probe as an operation, for conditions.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Probe(Operation):
    """An operation that reads ``activation @ direction + bias`` without a change; conditions use
    the reading.

    Args:
        direction: ``[feature]``.
        name: its name in conditions.
        bias: a number.
        over: whether ``probe > threshold`` is evaluated per token, or per row (see `Condition`).

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Add, Interventions, Probe
        >>> bridge = TransformerBridge.boot_embedded()
        >>> probe = Probe(torch.ones(128), "sure")
        >>> steer = Add(torch.randn(128), where=probe > 2.0)
        >>> pairs = Interventions(
        ...     [("blocks.1.hook_resid_post", probe), ("blocks.2.hook_resid_post", steer)], bridge
        ... )
        >>> bridge.run_with_hooks("Mary and", fwd_hooks=pairs).shape
        torch.Size([1, 3, 654])
    """

    direction: Tensor | str
    name: str
    bias: Number = 0.0
    over: str = "tokens"
    numbers = ("direction", "bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("over", self.over, ("tokens", "rows"))
        check_vectors("direction", self.direction)
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a text")
        if isinstance(self.direction, Tensor) and self.direction.ndim != 1:
            raise ValueError(
                f"direction has shape {list(self.direction.shape)}; it must be [feature]"
            )
        idle = [f.name for f in fields(Operation) if getattr(self, f.name) != f.default]
        if idle:
            raise ValueError(f"a probe reads everywhere: {', '.join(idle)} would have no effect")

    def __gt__(self, threshold: float) -> Condition:
        return Condition(self.name, True, threshold, self.over)

    def __lt__(self, threshold: float) -> Condition:
        return Condition(self.name, False, threshold, self.over)

    @staticmethod
    def fit(
        acts: Float[Tensor, "row pos feature"] | Sequence[Tensor],
        labels: Sequence[bool | int] | np.ndarray | Tensor,
        point: str,
        over: str = "last",
        **options: Any,
    ) -> FittedProbe:
        """Fit a probe on labelled activations, by logistic regression (scikit-learn).

        The features are standardised, and a token or the mean over tokens is classified: the last
        token for ``"last"``, otherwise the mean. As in Kramár et al. 2026, ``"max"`` and ``"ema"``
        aggregate another way only afterwards; see `FittedProbe` for the formulas. For
        ``"multimax"`` the positive rows are split into groups by k-means, and each head separates
        one group from the negative rows.

        Args:
            acts: ``[row pos feature]``, or for each row ``[pos feature]``.
            labels: 0 or 1 for each row.
            point: the hook point of the activations.
            over: ``"last"``, ``"mean"``, ``"max"``, ``"multimax"`` or ``"ema"``.
            options: ``mask=``, ``[row pos]``, 0 at padding; ``name=`` in conditions and answers;
                ``strength=``, scikit-learn's ``C``; ``heads=`` of multimax; ``alpha=`` of an
                exponential moving average; ``held_out=``, the share of rows for the report;
                ``seed=``.

        Raises:
            ImportError: scikit-learn is not installed.
            TypeError, ValueError: rows and labels that do not fit; an attention probe.

        Example:
            >>> import torch
            >>> from bridge.interventions import Probe
            >>> acts = torch.randn(80, 5, 16, generator=torch.Generator().manual_seed(0))
            >>> labels = acts[:, -1, 3] > 0
            >>> probe = Probe.fit(acts, labels, "blocks.1.hook_resid_post", over="last")
            >>> probe.report().auroc > 0.9
            True
        """
        return fit(acts, labels, point, over, **options)

    @property
    def remembers(self) -> bool:
        return True

    def check_point(self, hook: HookPoint) -> None:
        super().check_point(hook)
        axes = hook.point.axes.split()
        if len(axes) != 3 or axes[0] != "batch" or axes[1] not in POSITIONS:
            raise ValueError(
                f"{hook.name} has the axes [{hook.point.axes}]; a probe reads [batch pos feature]"
            )

    def __call__(self, activation: Tensor, hook: HookPoint, **inputs: Tensor) -> Tensor:
        self.check_point(hook)
        readings, step = probe_readings(hook)
        values = activation @ self.number("direction", activation, inputs, hook)
        values = values + self.number("bias", activation, inputs, hook)
        unpadded = self._without_padding(values, tokens_along(1, activation, hook))
        highest = unpadded.reshape(user_rows(len(values), hook), -1).amax(-1)
        before = readings.get(self.name)
        if before is not None and before.highest.shape == highest.shape:
            highest = torch.maximum(highest, before.highest.to(highest.device))
        readings[self.name] = TokenReadings(step, values.detach(), highest.detach())
        return activation

    @staticmethod
    def _without_padding(values: Tensor, tokens: SequencePart) -> Tensor:
        """Return the values ``[row token]`` with minus infinity at padding."""
        if tokens.real is None:
            return values
        places = torch.arange(tokens.length, device="cpu") + tokens.first
        real = tokens.real.to(values.device)[:, places.clamp(max=tokens.prompt - 1)]
        generated = (places >= tokens.prompt).to(values.device)
        return values.masked_fill(~(real | generated), float("-inf"))


# --------------------------------------------------------------------------------------------------
# What a probe reads.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeReading:
    """A probe's reading of one text.

    Attributes:
        value: the aggregated reading.
        tokens: the reading of each token, ``activation @ direction + bias``, ``[pos]``. With
            several heads, the products that the value is computed from, without the bias: ``[pos
            head]``, values first, then queries.
    """

    value: float
    tokens: Float[Tensor, " pos *head"]


@dataclass(frozen=True)
class ProbeReport:
    """How well a probe separates the rows that it was not fitted on, and three controls.

    Areas under the ROC curve (AUROC) are of the held-out rows: 0.5 is chance, 1.0 is perfect.

    Attributes:
        auroc: the probe's AUROC.
        threshold: the reading above which a row counts as positive: the largest difference of true
            and false positives on the training rows.
        false_positives: the share of held-out negatives above the threshold.
        true_positives: the share of held-out positives above the threshold.
        shuffled: the AUROC of probes fitted on shuffled labels (Hewitt and Liang 2019), averaged.
        random: the AUROC of random directions, averaged; the training rows decide their sign.
        length: the AUROC of the number of tokens; the training rows decide its sign.
        rows: the number of held-out rows.
    """

    auroc: float
    threshold: float
    false_positives: float
    true_positives: float
    shuffled: float
    random: float
    length: float
    rows: int


@dataclass(frozen=True)
class ProbeAgreement:
    """The decisions of a probe in a run and in an engine (see `FittedProbe.compare`).

    Attributes:
        decisions: the number of compared decisions: one per token, or, for a probe with several
            heads, one per text.
        positive: how many of them are positive in the run.
        within_rounding: how many differ, where the run's reading is so close to the threshold that
            rounding explains it.
        different: how many others differ.
        largest: the largest difference of two readings.
    """

    decisions: int
    positive: int
    within_rounding: int
    different: int
    largest: float


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedProbe:
    """A probe at a hook point: one or several directions, and the aggregation over tokens.

    With the activation ``x_j`` of token ``j`` of ``n``, the value ``v_h`` of head ``h``, the query
    ``q_h`` and the bias ``b``, its reading of a text is, as in Kramár et al. 2026 ("Building
    Production-Ready Probes For Gemini", https://arxiv.org/abs/2601.11516):

    - ``"last"``: ``v . x_n + b``
    - ``"mean"``: ``(1 / n) sum_j v . x_j + b``
    - ``"max"``: ``max_j v . x_j + b``
    - ``"multimax"``: ``sum_h max_j v_h . x_j + b``
    - ``"ema"``: ``max_j E_j + b``, with ``E_0 = 0`` and ``E_j = alpha v . x_j + (1 - alpha)
      E_(j-1)``
    - ``"attention"``: ``sum_h sum_j softmax_j(q_h . x_j) (v_h . x_j) + b``

    (Kramár et al. have no bias, and an MLP before multimax and attention, which is not available
    here.) `Probe.fit` fits all but attention, whose weights are passed here.

    Args:
        point: the hook point, with the axes ``[batch pos feature]``.
        values: ``[head feature]``; one head except for multimax and attention.
        over: the aggregation.
        name: its name in conditions and answers.
        bias: a number.
        queries: for attention, ``[head feature]``.
        alpha: for ``"ema"``, the weight of the current token.
        threshold: the reading above which a text counts as positive.
        fitted: what `report` returns; None for weights from elsewhere.

    Raises:
        ValueError: weights that do not fit the aggregation.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import FittedProbe
        >>> bridge = TransformerBridge.boot_embedded()
        >>> probe = FittedProbe(
        ...     point="blocks.1.hook_resid_post",
        ...     values=torch.ones(2, 128),
        ...     queries=torch.zeros(2, 128),
        ...     over="attention",
        ...     name="loaded",
        ... )
        >>> bridge.readings(["Mary and John", "Mary"], [probe])[1]["loaded"].tokens.shape
        torch.Size([2, 4])
    """

    point: str
    values: Float[Tensor, "head feature"]
    over: str
    name: str = "probe"
    bias: float = 0.0
    queries: Float[Tensor, "head feature"] | None = None
    alpha: float = 0.5
    threshold: float = 0.0
    fitted: ProbeReport | None = None

    def __post_init__(self) -> None:
        check_choice("over", self.over, AGGREGATIONS)
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a text")
        for name in ("bias", "alpha", "threshold"):
            if not isinstance(getattr(self, name), int | float):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be a number")
        if self.values.ndim != 2 or not self.values.is_floating_point():
            raise ValueError(f"values is {shown(self.values)}; it must be [head feature]")
        if len(self.values) != 1 and self.over not in ("multimax", "attention"):
            raise ValueError(f'over="{self.over}" has one head; values has {len(self.values)}')
        if (self.queries is not None) != (self.over == "attention"):
            raise ValueError(f'queries are for over="attention"; over is {self.over!r}')
        if self.queries is not None and self.queries.shape != self.values.shape:
            raise ValueError(
                f"queries has shape {list(self.queries.shape)}, values {list(self.values.shape)}:"
                " they must be the same"
            )
        if not bool(self.weights.isfinite().all()):
            raise ValueError("the weights of the probe contain NaN or infinity")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be above 0, and at most 1")

    @property
    def weights(self) -> Float[Tensor, "column feature"]:
        """The values, then the queries, in float32: a token's products with them are all that a
        reading is computed from.
        """
        parts = [self.values] if self.queries is None else [self.values, self.queries]
        return torch.cat(parts).detach().float()

    def products(self, activation: Float[Tensor, "*any feature"]) -> Float[Tensor, "*any column"]:
        """Return an activation's products with the weights, in float32."""
        return activation.detach().float() @ self.weights.to(activation.device).T

    def aggregate(self, products: Float[Tensor, "pos column"]) -> float:
        """Return the reading of one text from its tokens' products, without padding.

        Raises:
            ValueError: there are no tokens.
        """
        if not len(products):
            raise ValueError("a text without tokens has no reading")
        heads = len(self.values)
        values, queries = products.double().split([heads, products.shape[1] - heads], 1)
        return float(self._pooled(values, queries).sum()) + self.bias

    def _pooled(self, values: Tensor, queries: Tensor) -> Tensor:
        """Return each head's reading of one text, ``[head]``, from products ``[pos head]``."""
        if self.over == "last":
            return values[-1]
        if self.over == "mean":
            return values.mean(0)
        if self.over == "attention":
            return (queries.softmax(0) * values).sum(0)
        if self.over != "ema":
            return values.amax(0)
        averages = []
        average = torch.zeros_like(values[0])
        for value in values:
            average = self.alpha * value + (1 - self.alpha) * average
            averages.append(average)
        return torch.stack(averages).amax(0)

    def reading(self, products: Float[Tensor, "pos column"]) -> ProbeReading:
        """Return the reading of one text from its tokens' products, without padding."""
        products = products.cpu()
        single = products.shape[1] == 1
        tokens = products[:, 0] + self.bias if single else products
        return ProbeReading(self.aggregate(products), tokens)

    def report(self) -> ProbeReport:
        """Return the quality of the probe on held-out rows, with controls.

        Raises:
            ValueError: its weights come from elsewhere.
        """
        if self.fitted is None:
            raise ValueError(
                f"the probe {self.name!r} was not made by Probe.fit, so there are no held-out rows"
                " to report on"
            )
        return self.fitted

    def __gt__(self, threshold: float) -> Condition:
        return self.operation > threshold

    def __lt__(self, threshold: float) -> Condition:
        return self.operation < threshold

    @property
    def operation(self) -> Probe:
        """The operation that reads each token, for conditions: put ``(probe.point,
        probe.operation)`` before ``(later point, Add(vector, where=probe > 2.0))``. A condition
        tests each token's own reading.

        Raises:
            ValueError: it has several heads.
        """
        if len(self.weights) > 1:
            raise ValueError(
                f"the probe {self.name!r} has several heads or queries, so a token has no reading"
                " of its own: conditions are for probes with one direction"
            )
        return Probe(self.weights[0], self.name, float(self.bias))

    def check(self, bridge: StudiedBridge) -> HookPoint:
        """Return its hook point in a model.

        Raises:
            UnknownHookError: there is no such point.
            ValueError: its axes are not ``[batch pos feature]``, or its width differs.
        """
        hook = bridge.names.find(self.point)
        axes = hook.point.axes.split()
        if len(axes) != 3 or axes[:2] != ["batch", "pos"]:
            raise ValueError(
                f"{hook.name} has the axes [{hook.point.axes}]; a probe reads [batch pos feature]"
            )
        width = self.values.shape[1]
        if size_of(bridge.cfg, axes[2]) not in (None, width):
            raise ValueError(
                f"the probe {self.name!r} has {width} features, {hook.name}"
                f" {size_of(bridge.cfg, axes[2])}"
            )
        return hook

    def compare(
        self, bridge: Any, engine: Any, texts: Sequence[str], tolerance: float = 1e-4
    ) -> ProbeAgreement:
        """Compare the decisions ``reading > threshold`` in runs of a bridge and in an engine.

        Args:
            bridge: a bridge.
            engine: a `bridge.engine.Engine` of the same model.
            texts: the texts; every token is compared.
            tolerance: a reading this close to the threshold, relative to the largest reading, is
                within rounding.

        Raises:
            ValueError: the two split a text into different numbers of tokens.
        """
        runs = [reading[self.name] for reading in bridge.readings(texts, [self])]
        answers = engine.generate(list(texts), 1, readings=[self])
        pairs = zip(runs, [answer.readings[self.name] for answer in answers], strict=True)
        numbers: list[tuple[Tensor, Tensor]] = []
        for run, other in pairs:
            if run.tokens.shape != other.tokens.shape:
                raise ValueError(
                    f"a text has {len(run.tokens)} tokens in the run and {len(other.tokens)} in the"
                    " engine: pass texts that both begin alike"
                )
            single = run.tokens.ndim == 1
            both = (run, other)
            run_numbers, other_numbers = [
                x.tokens if single else torch.tensor([x.value]) for x in both
            ]
            numbers.append((run_numbers, other_numbers))
        ours, theirs = (torch.cat(list(side)) for side in zip(*numbers, strict=True))
        return _agreement(ours, theirs, self.threshold, tolerance)

    def save(self, file: str | PathLike[str]) -> None:
        """Write the probe to a safetensors file."""
        tensors = {"values": self.values, "queries": self.queries}
        kept = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
        names = ("point", "over", "name", "bias", "alpha", "threshold")
        header: dict[str, object] = {name: getattr(self, name) for name in names}
        header["fitted"] = None if self.fitted is None else asdict(self.fitted)
        save_file(kept, fspath(file), {_HEADER: json.dumps(header)})

    @classmethod
    def load(cls, file: str | PathLike[str], bridge: StudiedBridge | None = None) -> FittedProbe:
        """Read a probe that `save` wrote. Nothing in the file is executed.

        Args:
            file: the path.
            bridge: the model that it is for, whose hook point and sizes must fit.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds something else.
        """
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            with safe_open(path, framework="pt") as opened:
                header = json.loads((opened.metadata() or {})[_HEADER])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            fitted = header.pop("fitted")
            fitted = None if fitted is None else ProbeReport(**fitted)
            probe = cls(**header, **tensors, fitted=fitted)
        except (SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a file of a probe: {error}") from error
        if bridge is not None:
            probe.check(bridge)
        return probe


def _agreement(ours: Tensor, theirs: Tensor, threshold: float, tolerance: float) -> ProbeAgreement:
    """Compare readings of a run and of an engine; see `FittedProbe.compare`."""
    differ = (ours > threshold) != (theirs > threshold)
    near = (ours - threshold).abs() <= tolerance * float(ours.abs().max().clamp_min(1.0))
    return ProbeAgreement(
        len(ours),
        int((ours > threshold).sum()),
        int((differ & near).sum()),
        int((differ & ~near).sum()),
        float((ours - theirs).abs().max()),
    )


def check_names(probes: Sequence[FittedProbe]) -> None:
    """Reject readings that are no probes, or that share a name.

    Raises:
        TypeError: one is no `FittedProbe`.
        ValueError: two have the same name.
    """
    for probe in probes:
        if not isinstance(probe, FittedProbe):
            raise TypeError(
                f"readings has {shown(probe)}; it takes what Probe.fit returns, or a FittedProbe"
            )
    names = [probe.name for probe in probes]
    if len(set(names)) < len(names):
        raise ValueError(f"the probes are named {', '.join(names)}: give each its own name")


class ProbesReader:
    """A callback of a run that keeps the products of some probes, and no activation.

    Args:
        probes: the probes.
        bridge: the bridge, on which they are checked.

    Attributes:
        points: the hook points that they read.
    """

    def __init__(self, probes: Sequence[FittedProbe], bridge: StudiedBridge) -> None:
        if not probes:
            raise ValueError("there are no probes to read with: the list is empty")
        check_names(probes)
        self._probes: dict[str, list[FittedProbe]] = {}
        for probe in probes:
            self._probes.setdefault(probe.check(bridge).name, []).append(probe)
        self.points = list(self._probes)
        self._products: dict[str, Tensor] = {}

    def __call__(self, activation: Tensor, hook: HookPoint) -> None:
        for probe in self._probes[hook.name]:
            self._products[probe.name] = probe.products(activation).cpu()

    def take(self, mask: Tensor | None) -> list[dict[str, ProbeReading]]:
        """Return the readings of the run's rows.

        Args:
            mask: ``[row pos]``, 0 at padding; None: no padding.
        """
        probes = [probe for group in self._probes.values() for probe in group]
        rows = []
        for row in range(len(self._products[probes[0].name])):
            real = slice(None) if mask is None else mask[row].bool().cpu()
            rows.append({x.name: x.reading(self._products[x.name][row, real]) for x in probes})
        self._products.clear()
        return rows


# --------------------------------------------------------------------------------------------------
# Fitting.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """The arguments of a fit: the aggregation, the inverse strength of the penalty, the number of
    heads, and the seed.
    """

    over: str
    strength: float
    heads: int
    seed: int

    def weights(self, rows: Rows, positive: Array) -> tuple[Tensor, float]:
        """Return the values ``[head feature]`` and the bias of a probe."""
        last = self.over == "last"
        pooled = torch.stack([(x[-1] if last else x.double().mean(0)).double() for x in rows])
        x = pooled.cpu().numpy()
        groups = [positive]
        if self.over == "multimax":
            groups = self._groups(x, positive)
        fits = [_logistic(x[group | ~positive], group[group | ~positive], self) for group in groups]
        values = torch.from_numpy(np.stack([coefficients for coefficients, _ in fits]))
        return values.float(), float(sum(bias for _, bias in fits))

    def _groups(self, x: Array, positive: Array) -> list[Array]:
        """Split the positive rows into one group for each head, by k-means."""
        cluster = _sklearn("cluster").KMeans(self.heads, n_init=10, random_state=self.seed)
        labels = np.full(len(x), -1)
        labels[positive] = cluster.fit_predict(x[positive])
        return [labels == head for head in range(self.heads)]


def fit(
    acts: Float[Tensor, "row pos feature"] | Rows,
    labels: Sequence[bool | int] | Tensor | Array,
    point: str,
    over: str = "last",
    *,
    mask: Tensor | None = None,
    name: str = "probe",
    strength: float = 1.0,
    heads: int = 4,
    alpha: float = 0.5,
    held_out: float = 0.2,
    seed: int = 0,
) -> FittedProbe:
    """Fit a probe; see `Probe.fit`."""
    check_choice("over", over, AGGREGATIONS)
    if over == "attention":
        raise ValueError(
            'over="attention" has no convex fit: train its weights elsewhere, and pass them to'
            ' FittedProbe(point=, values=, queries=, over="attention")'
        )
    if not strength > 0 or not 0 < held_out < 1:
        raise ValueError(
            f"strength is {strength} and held_out {held_out}; strength must be above 0, and"
            " held_out between 0 and 1"
        )
    check_positive("heads", heads)
    rows = _rows(acts, mask)
    positive = _labels(labels, len(rows))
    generator = torch.Generator().manual_seed(seed)
    train = _training_rows(positive, held_out, generator)
    options = _Fit(over, strength, heads, seed)
    if over == "multimax" and heads > int((positive & train).sum()):
        raise ValueError(f"heads is {heads}, and there are fewer positive rows to fit them on")
    values, bias = options.weights(
        [x for x, own in zip(rows, train, strict=True) if own], positive[train]
    )
    probe = FittedProbe(point=point, values=values, over=over, name=name, bias=bias, alpha=alpha)
    readings = _readings_of(probe, rows)
    probe = replace(probe, threshold=_best_threshold(readings[train], positive[train]))
    fitted = _report(probe, readings, rows, positive, train, options, generator)
    return replace(probe, fitted=fitted)


def _rows(acts: Tensor | Rows, mask: Tensor | None) -> list[Tensor]:
    """Return the activations of each row, ``[pos feature]``, without padding."""
    if isinstance(acts, Tensor) and acts.ndim != 3:
        raise ValueError(
            f"acts is {shown(acts)}; it must be [row pos feature], or a list of [pos feature]"
            " (one activation per row: acts[:, None])"
        )
    if mask is not None and (not isinstance(acts, Tensor) or mask.shape != acts.shape[:2]):
        raise ValueError(f"mask is {shown(mask)}; it must be [row pos], for acts [row pos feature]")
    rows = [x if mask is None else x[mask[i].bool().to(x.device)] for i, x in enumerate(acts)]
    widths = {x.shape[-1] for x in rows}
    for i, x in enumerate(rows):
        if x.ndim != 2 or not len(x) or len(widths) > 1 or not bool(x.isfinite().all()):
            raise ValueError(
                f"acts[{i}] is {shown(x)}; each row must be [pos feature] with one token or more,"
                " of the same width, and without NaN or infinity"
            )
    return [x.detach().float() for x in rows]


def _labels(labels: Sequence[bool | int] | Tensor | Array, count: int) -> Array:
    """Return the labels as an array of booleans.

    Raises:
        ValueError: they do not fit the rows.
    """
    values = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if values.shape != (count,) or not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"labels has shape {list(values.shape)} and values {sorted(set(values.flat))[:4]}; it"
            f" must have a 0 or 1 for each of the {count} rows"
        )
    positive = values.astype(bool)
    if min(positive.sum(), (~positive).sum()) < _FEWEST:
        raise ValueError(
            f"{int(positive.sum())} of {count} rows are positive: each class needs {_FEWEST}"
        )
    return positive


def _training_rows(positive: Array, held_out: float, generator: torch.Generator) -> Array:
    """Return a mask of the training rows: the same share of both classes is held out."""
    train = np.ones(len(positive), dtype=bool)
    for label in (True, False):
        rows = np.flatnonzero(positive == label)
        rows = rows[torch.randperm(len(rows), generator=generator).numpy()]
        count = min(max(1, round(len(rows) * held_out)), len(rows) - 2)
        train[rows[:count]] = False
    return train


def _logistic(x: Array, positive: Array, options: _Fit) -> tuple[Array, float]:
    """Return the coefficients and the intercept of scikit-learn's logistic regression on
    standardised features, in the units of the features.
    """
    scale = x.std(0)
    scale[scale == 0] = 1.0
    middle = x.mean(0)
    regression = _sklearn("linear_model").LogisticRegression(
        C=options.strength, max_iter=10_000, tol=1e-8
    )
    regression.fit((x - middle) / scale, positive)
    coefficients = regression.coef_[0] / scale
    return coefficients, float(regression.intercept_[0] - coefficients @ middle)


def _sklearn(module: str) -> Any:
    """Import a module of scikit-learn.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ImportError(
            "Probe.fit needs scikit-learn: pip install 'transformer-bridge[probes]'"
        ) from error


def _readings_of(probe: FittedProbe, rows: Rows) -> Array:
    """Return the reading of each row."""
    return np.array([probe.aggregate(probe.products(x)) for x in rows])


def _best_threshold(readings: Array, positive: Array) -> float:
    """Return the threshold with the largest difference of true and false positives, halfway between
    two readings.

    Raises:
        ValueError: all readings are the same.
    """
    levels = np.unique(readings)
    if len(levels) == 1:
        raise ValueError("the activations of all rows read the same: there is nothing to fit")
    middles = (levels[:-1] + levels[1:]) / 2
    share = lambda group: (
        1 - np.searchsorted(np.sort(readings[group]), middles, "right") / sum(group)
    )
    return float(middles[np.argmax(share(positive) - share(~positive))])


def _many_readings(probe: FittedProbe, values: Tensor, rows: Rows) -> Array:
    """Return the reading of each row with other values in place of a probe's, but for the bias.

    Args:
        probe: the probe, without queries.
        values: ``[probe head feature]``.
        rows: the activations of each row.
    """
    readings = []
    for x in rows:
        products = (x @ values.flatten(0, 1).to(x.device).T).double()
        pooled = probe._pooled(products, products[:, :0])
        readings.append(pooled.reshape(values.shape[:2]).sum(1).cpu())
    return torch.stack(readings, 1).numpy()


def _mixed(positive: Array, train: Array, generator: torch.Generator) -> Array:
    """Return shuffled labels; training rows and others keep their numbers of positives."""
    mixed = positive.copy()
    for part in (train, ~train):
        order = torch.randperm(int(part.sum()), generator=generator).numpy()
        mixed[part] = mixed[part][order]
    return mixed


def _report(
    probe: FittedProbe,
    readings: Array,
    rows: Rows,
    positive: Array,
    train: Array,
    options: _Fit,
    generator: torch.Generator,
) -> ProbeReport:
    """Return the report on the rows that are not training rows."""
    area: Callable[[Array, Array], float] = _sklearn("metrics").roc_auc_score
    test = ~train

    def oriented(numbers: Array) -> float:
        sign = 1 if area(positive[train], numbers[train]) >= 0.5 else -1
        return float(area(positive[test], sign * numbers[test]))

    directions = torch.randn(_DIRECTIONS, *probe.values.shape, generator=generator)
    mixed = [_mixed(positive, train, generator) for _ in range(_SHUFFLES)]
    chosen = [x for x, own in zip(rows, train, strict=True) if own]
    fits = torch.stack([options.weights(chosen, labels[train])[0] for labels in mixed])
    shuffles = zip(mixed, _many_readings(probe, fits, rows), strict=True)
    above = readings > probe.threshold
    return ProbeReport(
        auroc=float(area(positive[test], readings[test])),
        threshold=probe.threshold,
        false_positives=float(above[test & ~positive].mean()),
        true_positives=float(above[test & positive].mean()),
        shuffled=float(
            np.mean([area(labels[test], numbers[test]) for labels, numbers in shuffles])
        ),
        random=float(np.mean([*map(oriented, _many_readings(probe, directions, rows))])),
        length=oriented(np.array([float(len(x)) for x in rows])),
        rows=int(test.sum()),
    )
