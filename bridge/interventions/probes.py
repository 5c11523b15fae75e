"""Probes: linear readings of activations, aggregated over the tokens of a text."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
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
from bridge.interventions.stored import (
    FileKind,
    InterventionsFileError,
    Model,
    read_content,
    refusing,
    write,
)

#: How a probe's readings of the tokens become one number per text.
AGGREGATIONS = ("last", "mean", "max", "multimax", "ema", "attention")
#: The numbers of random directions, and of shuffles of the labels, that a report averages over.
_DIRECTIONS, _SHUFFLES = 20, 5
#: The minimum number of rows of each class: one is held out.
_FEWEST = 3

_FILE = FileKind("probe")

Rows = Sequence[Tensor]
Array = NDArray[Any]


# --------------------------------------------------------------------------------------------------
# A probe as an operation, for conditions.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Probe(Operation):
    """An operation that reads ``activation @ direction + bias``, and changes nothing; conditions
    use the reading.

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

        The features are standardised. The regression classifies the last token for ``"last"``,
        otherwise the mean over tokens. As in Kramár et al. 2026, ``"max"`` and ``"ema"`` are fitted
        on this mean too, and use their own aggregation only for readings; see `FittedProbe` for the
        formulas. For ``"multimax"`` the positive rows are split into groups by k-means, and each
        head separates one group from the negative rows.

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
    """The numbers that a probe reads from one text: one per token, and their aggregate.

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
        threshold: the reading above which a row counts as positive. It maximises the true positive
            rate minus the false positive rate on the training rows.
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
        ValueError: weights that do not fit the aggregation, or `alpha` out of range.

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
        shape = self.values.shape
        several = self.over in ("multimax", "attention")
        if len(shape) != 2 or (len(self.values) > 1 and not several):
            raise ValueError(
                f'values is {shown(self.values)}; over="{self.over}" takes [head feature] with'
                f" {'one head or more' if several else 'one head'}"
            )
        queries = None if self.queries is None else self.queries.shape
        if queries != (shape if self.over == "attention" else None):
            raise ValueError(
                f"queries is {shown(self.queries)}; it must have the shape of values for"
                ' over="attention", and be None otherwise'
            )
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be above 0, and at most 1")

    @property
    def weights(self) -> Float[Tensor, "column feature"]:
        """The values, then the queries, in float32. A reading is computed from the tokens' products
        with these alone.
        """
        parts = [self.values] if self.queries is None else [self.values, self.queries]
        return torch.cat(parts).detach().float()

    def products(self, activation: Float[Tensor, "*any feature"]) -> Float[Tensor, "*any column"]:
        """Return an activation's products with the weights, in float32."""
        return activation.detach().float() @ self.weights.to(activation.device).T

    def aggregate(self, products: Float[Tensor, "pos column"]) -> float:
        """Return the reading of one text from its tokens' products, without padding."""
        heads = len(self.values)
        values, queries = products.double().split([heads, products.shape[1] - heads], 1)
        return float(self._pooled(values, queries).sum() + self.bias)

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
        tokens = products[:, 0] + self.bias if products.shape[1] == 1 else products
        return ProbeReading(self.aggregate(products), tokens.cpu())

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
        """Check that the probe fits a model, and return its hook point there.

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

    def save(self, file: str | PathLike[str], bridge: StudiedBridge | None = None) -> None:
        """Write the probe to one safetensors file: tensors, and a header that describes them.

        Args:
            file: the path.
            bridge: the model that it was fitted on, whose name, class and sizes are written too, so
                that `load` rejects another one; None: only its hook point and width are checked.

        Raises:
            UnknownHookError, ValueError: it does not fit the model.

        Example:
            >>> import tempfile, torch
            >>> from pathlib import Path
            >>> from bridge import TransformerBridge
            >>> from bridge.interventions import FittedProbe
            >>> bridge = TransformerBridge.boot_embedded()
            >>> probe = FittedProbe(
            ...     point="blocks.1.hook_resid_post", values=torch.ones(1, 128), over="mean"
            ... )
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     probe.save(Path(folder) / "probe.safetensors", bridge)
            ...     again = FittedProbe.load(Path(folder) / "probe.safetensors", bridge)
            >>> torch.equal(again.values, probe.values), again.over
            (True, 'mean')
        """
        if bridge is not None:
            self.check(bridge)
        tensors = {"values": self.values, "numbers": [self.bias, self.alpha, self.threshold]}
        if self.queries is not None:
            tensors["queries"] = self.queries
        if self.fitted is not None:
            tensors["report"] = astuple(self.fitted)
        # Numbers are tensors in float64: JSON does not know infinity, which a threshold may be.
        stored = {
            name: value.detach().cpu().clone().contiguous()
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in tensors.items()
        }
        entry = {"point": self.point, "over": self.over, "name": self.name}
        write(file, _FILE, entry, stored, None if bridge is None else Model.of(bridge))

    @classmethod
    def load(cls, file: str | PathLike[str], bridge: StudiedBridge | None = None) -> FittedProbe:
        """Read a probe that `save` wrote.

        Args:
            file: the path.
            bridge: the model that it is for; None: not checked before the probe is used.

        Raises:
            FileNotFoundError: there is no such file.
            InterventionsFileError: the file is damaged, contains something else, or has a format
                that this version does not support; or the probe does not fit the model's hook
                point.
            OtherModelError: it was fitted on a model of a different class, size or processing. (If
                only the name differs, there is a warning.)

        Example:
            >>> from bridge.interventions import FittedProbe
            >>> FittedProbe.load("probe.safetensors")
            Traceback (most recent call last):
            FileNotFoundError: there is no file probe.safetensors
        """

        def check(model: Model) -> None:
            if bridge is not None:
                model.check(bridge, "this probe was")

        with refusing(Path(file)):
            probe = cls(**_fields_of(*read_content(Path(file), _FILE, check)))
            if bridge is not None:
                probe.check(bridge)
            return probe

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
        ours, theirs = map(self._decided, (runs, [x.readings[self.name] for x in answers]))
        if len(ours) != len(theirs):
            raise ValueError(
                f"the run has {len(ours)} tokens and the engine {len(theirs)}: pass texts that both"
                " begin alike"
            )
        above = ours > self.threshold
        differ = above != (theirs > self.threshold)
        near = (ours - self.threshold).abs() <= tolerance * ours.abs().max().clamp_min(1.0)
        return ProbeAgreement(
            decisions=len(ours),
            positive=int(above.sum()),
            within_rounding=int((differ & near).sum()),
            different=int((differ & ~near).sum()),
            largest=float((ours - theirs).abs().max()),
        )

    def _decided(self, readings: Sequence[ProbeReading]) -> Tensor:
        """Return the readings that are compared with the threshold: of tokens, or, with several
        heads, of texts.
        """
        if len(self.weights) > 1:
            return torch.tensor([reading.value for reading in readings])
        return torch.cat([reading.tokens for reading in readings])


def _fields_of(entry: object, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a probe's fields from a file's entry and tensors.

    Raises:
        InterventionsFileError: they are not those of a probe.
    """
    names = ("point", "over", "name")
    if not isinstance(entry, dict) or entry.keys() != {*names}:
        raise InterventionsFileError(f"its probe is {entry!r}; it has to have {', '.join(names)}")
    if not all(isinstance(value, str) for value in entry.values()):
        raise InterventionsFileError(f"its probe is {entry!r}; the fields have to be text")
    _check_tensors(tensors)
    bias, alpha, threshold = tensors["numbers"].tolist()
    report = tensors.get("report")
    return {
        **entry,
        "values": tensors["values"],
        "queries": tensors.get("queries"),
        "bias": bias,
        "alpha": alpha,
        "threshold": threshold,
        "fitted": None if report is None else _report_of(report.tolist()),
    }


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    """Check the names and shapes of a file's tensors.

    Raises:
        InterventionsFileError: they are not those of a probe.
    """
    sizes = {"numbers": 3, "report": len(fields(ProbeReport))}
    expected = {"values", "numbers", *(tensors.keys() & {"queries", "report"})}
    if tensors.keys() != expected:
        raise InterventionsFileError(
            f"it has the tensors {', '.join(sorted(tensors))}; a probe has values and numbers, and"
            " may have queries and report"
        )
    for name in tensors.keys() & {"values", "queries"}:
        if tensors[name].ndim != 2 or not tensors[name].is_floating_point():
            raise InterventionsFileError(f"{name} is {shown(tensors[name])}; it is [head feature]")
    for name, size in sizes.items():
        if name in tensors and tensors[name].shape != (size,):
            raise InterventionsFileError(f"{name} is {shown(tensors[name])}; it has {size} numbers")


def _report_of(numbers: Sequence[float]) -> ProbeReport:
    values: dict[str, Any] = dict(zip((f.name for f in fields(ProbeReport)), numbers, strict=True))
    return ProbeReport(**{**values, "rows": int(values["rows"])})


def probes_at(probes: Sequence[FittedProbe], bridge: StudiedBridge) -> dict[str, list[FittedProbe]]:
    """Return the probes of each hook point, by its name.

    Raises:
        ValueError: two have the same name, or one does not fit its hook point.
    """
    by_point: dict[str, list[FittedProbe]] = {}
    for probe in probes:
        by_point.setdefault(probe.check(bridge).name, []).append(probe)
    names = [probe.name for probe in probes]
    if len({*names}) < len(names):
        raise ValueError(f"the probes are named {', '.join(names)}: give each its own name")
    return by_point


def readings_of(
    by_point: Mapping[str, Sequence[FittedProbe]], acts: Mapping[str, Tensor]
) -> dict[str, ProbeReading]:
    """Return each probe's reading of one text, by the probe's name.

    Args:
        by_point: the probes of each hook point.
        acts: the text's activations ``[pos feature]`` at each hook point.
    """
    return {
        probe.name: probe.reading(probe.products(acts[point]))
        for point, probes in by_point.items()
        for probe in probes
    }


# --------------------------------------------------------------------------------------------------
# Fitting.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """The rows of a fit, and its options; see `Probe.fit`.

    Attributes:
        rows: ``[pos feature]`` each.
        pooled: ``[row feature]``, the last token or the mean, in float64.
        train, test: the indices of the rows of each part.
        heads: the number of heads; 0: a single one, fitted on all positive rows.
        strength, random: scikit-learn's ``C``, and the source of random numbers.
    """

    rows: Rows
    pooled: Array
    train: Array
    test: Array
    heads: int
    strength: float
    random: np.random.RandomState

    def weights(self, positive: Array) -> tuple[Tensor, float]:
        """Return the values ``[head feature]`` and the bias of a probe fitted on the training
        rows."""
        x, positive = self.pooled[self.train], positive[self.train]
        groups = [positive]
        if self.heads:
            kinds = np.full(len(x), -1)
            means = _sklearn("cluster").KMeans(self.heads, n_init=10, random_state=self.random)
            kinds[positive] = means.fit_predict(x[positive])
            groups = [kinds == head for head in range(self.heads)]
        fits = [self._logistic(x, group, group | ~positive) for group in groups]
        values = np.stack([coefficients for coefficients, _ in fits])
        return torch.from_numpy(values).float(), float(sum(bias for _, bias in fits))

    def _logistic(self, x: Array, positive: Array, chosen: Array) -> tuple[Array, float]:
        """Return the coefficients and the intercept of a logistic regression on standardised
        features of the chosen rows, converted back to the units of the features.
        """
        scaler = _sklearn("preprocessing").StandardScaler()
        model = _sklearn("linear_model").LogisticRegression(
            C=self.strength, max_iter=10_000, tol=1e-8
        )
        model.fit(scaler.fit_transform(x[chosen]), positive[chosen])
        coefficients = model.coef_[0] / scaler.scale_
        return coefficients, model.intercept_[0] - coefficients @ scaler.mean_

    def readings(self, probe: FittedProbe) -> Array:
        """Return the reading of each row."""
        return np.array([probe.aggregate(probe.products(x)) for x in self.rows])

    def area(self, labels: Array, readings: Array, oriented: bool = False) -> float:
        """Return the area under the ROC curve of the held-out rows.

        Args:
            labels, readings: those of all rows.
            oriented: whether the training rows decide the sign of the readings.
        """
        area = _sklearn("metrics").roc_auc_score
        below = oriented and area(labels[self.train], readings[self.train]) < 0.5
        return float(
            area(labels[self.test], -readings[self.test] if below else readings[self.test])
        )

    def threshold(self, positive: Array, readings: Array) -> float:
        """Return the threshold that maximises the true positive rate minus the false positive rate
        on the training rows; it lies halfway between two readings.
        """
        readings, positive = readings[self.train], positive[self.train]
        levels = np.unique(readings)
        if len(levels) == 1:
            raise ValueError("the activations of all rows read the same: there is nothing to fit")
        middles = (levels[:-1] + levels[1:]) / 2
        true, false = readings[positive], readings[~positive]
        gains = [(true > level).mean() - (false > level).mean() for level in middles]
        return float(middles[np.argmax(gains)])

    def report(self, probe: FittedProbe, positive: Array, readings: Array) -> ProbeReport:
        """Return the report on the held-out rows."""
        above = (readings > probe.threshold)[self.test]
        truth = positive[self.test]
        lengths = np.array([len(x) for x in self.rows])
        return ProbeReport(
            auroc=self.area(positive, readings),
            threshold=probe.threshold,
            false_positives=float(above[~truth].mean()),
            true_positives=float(above[truth].mean()),
            shuffled=float(np.mean([self._shuffled(probe, positive) for _ in range(_SHUFFLES)])),
            random=float(np.mean([self._random(probe, positive) for _ in range(_DIRECTIONS)])),
            length=self.area(positive, lengths, oriented=True),
            rows=len(self.test),
        )

    def _random(self, probe: FittedProbe, positive: Array) -> float:
        """Return the AUROC of a random direction."""
        values = torch.from_numpy(self.random.standard_normal(probe.values.shape)).float()
        return self.area(positive, self.readings(replace(probe, values=values)), oriented=True)

    def _shuffled(self, probe: FittedProbe, positive: Array) -> float:
        """Return the AUROC of a probe fitted on shuffled labels. Training and held-out rows keep
        their numbers of positives.
        """
        mixed = positive.copy()
        for part in (self.train, self.test):
            mixed[part] = mixed[self.random.permutation(part)]
        values, bias = self.weights(mixed)
        return self.area(mixed, self.readings(replace(probe, values=values, bias=bias)))


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
    check_positive("heads", heads)
    rows = _rows(acts, mask)
    positive = _labels(labels, len(rows))
    train, test = _sklearn("model_selection").train_test_split(
        np.arange(len(rows)), test_size=held_out, stratify=positive, random_state=seed
    )
    x = _pooled(rows, over)
    random = np.random.RandomState(seed)
    task = _Fit(rows, x, train, test, heads if over == "multimax" else 0, strength, random)
    values, bias = task.weights(positive)
    probe = FittedProbe(point=point, values=values, over=over, name=name, bias=bias, alpha=alpha)
    readings = task.readings(probe)
    probe = replace(probe, threshold=task.threshold(positive, readings))
    return replace(probe, fitted=task.report(probe, positive, readings))


def _labels(labels: Any, count: int) -> Array:
    """Return the labels of the rows as booleans."""
    positive = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if positive.shape != (count,) or not np.isin(positive, (0, 1)).all():
        raise ValueError(
            f"labels is {shown(labels)}; it must have a 0 or 1 for each of the {count} rows"
        )
    positive = positive.astype(bool)
    if min(positive.sum(), (~positive).sum()) < _FEWEST:
        raise ValueError(
            f"{positive.sum()} of {count} rows are positive: each class needs {_FEWEST}"
        )
    return positive


def _pooled(rows: Rows, over: str) -> Array:
    """Return the classified vectors: the last token or the mean of each row, ``[row feature]``."""
    pooled = [x[-1] if over == "last" else x.double().mean(0) for x in rows]
    return torch.stack(pooled).double().cpu().numpy()  # type: ignore[no-any-return]


def _rows(acts: Tensor | Rows, mask: Tensor | None) -> list[Tensor]:
    """Return the activations of each row, ``[pos feature]``, without padding."""
    if mask is not None:
        acts = [x[real.bool().to(x.device)] for x, real in zip(acts, mask, strict=True)]
    for i, x in enumerate(acts):
        if x.ndim != 2 or not len(x):
            raise ValueError(
                f"acts[{i}] is {shown(x)}; each row must be [pos feature] with one token or more"
                " (one activation per row: acts[:, None])"
            )
    return [x.detach().float() for x in acts]


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
