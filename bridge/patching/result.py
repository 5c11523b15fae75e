"""`PatchingResult`: a sweep's metrics for each prompt, for several metrics, or with a baseline."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import act_name, suggestion
from bridge.rows import check_position

#: Attributes of TransformerLens's results that are missing here, with their replacements.
_ELSEWHERE = {
    "bootstrap_ci": "scipy.stats.bootstrap on the last axis of values or effect()",
    "permutation_pvalue": (
        "scipy.stats.permutation_test(permutation_type='samples') on the last axis of effect()"
    ),
    "to_dataframe": "index_df, and values",
    "patch_type_names": "the functions that patch several kinds of activations return tensors",
}


@dataclass(frozen=True, repr=False)
class PatchingResult:
    """The measurements of `generic_activation_patch`, if there is more than one number for each
    patch.

    Attributes:
        values: the metric of each patch, ``[metric, ..., batch]``: the first axis exists for
            several metrics, the last if rows were not averaged.
        axis_names: the names of the axes between these, starting with the layer; empty for a data
            frame.
        indices: the indices: one row per patch, or the user's data frame.
        metric_names: the names of the metrics.
        reduced: whether the values have no axis of rows.
        baseline: the metric of the unpatched run, ``[metric, batch]``, if requested.
        has_metric_axis: whether there are several metrics.

    Example:
        >>> import torch
        >>> from bridge.patching import PatchingResult
        >>> found = PatchingResult(
        ...     torch.tensor([[1.0, 3.0]]), ("layer",), [[0]], ("metric",), False, torch.ones(2)
        ... )
        >>> found.effect(), found.mean()
        (tensor([[0., 2.]]), tensor([2.]))
    """

    values: Float[Tensor, "..."]
    axis_names: Sequence[str]
    indices: Any
    metric_names: Sequence[str]
    reduced: bool
    baseline: Float[Tensor, "..."] | None = None
    has_metric_axis: bool = False
    picture: ClassVar[str] = "patching"

    def __repr__(self) -> str:
        shape = self.values.shape[self.has_metric_axis :]
        shape = shape if self.reduced else shape[:-1]
        axes = " ".join(self.axis_names) or "a data frame's rows"
        prompts = "" if self.reduced else f", {self.values.shape[-1]} prompts"
        means = self.mean() if self.has_metric_axis else self.mean()[None]
        best = []
        for name, values in zip(self.metric_names, means, strict=True):
            flat = values.nan_to_num(nan=-torch.inf)
            place = torch.unravel_index(flat.argmax(), flat.shape)
            where = ", ".join(str(int(index)) for index in place)
            best.append(f"{name} up to {float(flat.max()):.3g} at [{where}]")
        return f"PatchingResult({axes} {list(shape)}{prompts}; {'; '.join(best)})"

    def draw(
        self, tokens: Sequence[str] | None = None, *, clean: float | None = None, **options: Any
    ) -> Any:
        """Draw the mean over prompts with `bridge.pictures.patching`.

        Args:
            tokens: the text of each position, if positions are an axis.
            clean: the metric of the clean run: with it, 0 is the corrupted run, which must have
                been measured (``baseline=True``), and 1 the clean run.
            options: options of `bridge.pictures.patching`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: several metrics, or a data frame's rows; the corrupted run was not measured.
        """
        if self.has_metric_axis:
            raise ValueError(
                f"a picture is of one metric: result[{self.metric_names[0]!r}].draw() (there are"
                f" {', '.join(self.metric_names)})"
            )
        if not self.axis_names:
            raise ValueError("rows of a data frame have no axes: draw result.mean() with heat_map")
        axes = " ".join("head" if name == "head_index" else name for name in self.axis_names)
        if clean is not None:
            if self.baseline is None:
                raise ValueError("the unpatched run was not measured: use baseline=True")
            options |= {"clean": clean, "corrupted": float(self.baseline.mean())}
        pictures = importlib.import_module("bridge.pictures")
        defaults = {"metric": self.metric_names[0]}
        return pictures.patching(self.mean(), axes, tokens, **(defaults | options))

    @property
    def index_df(self) -> Any:
        """Return the data frame of indices.

        Raises:
            ImportError: pandas is not installed; it is not one of this package's dependencies.
        """
        if hasattr(self.indices, "itertuples"):
            return self.indices
        return data_frame(self.indices, self.axis_names)

    def __getitem__(self, metric_name: str) -> PatchingResult:
        """Return the result of one metric.

        Raises:
            KeyError: there is no such metric.
        """
        if metric_name not in self.metric_names:
            raise KeyError(
                f"there is no metric {metric_name!r}; there are {', '.join(self.metric_names)}"
            )
        if not self.has_metric_axis:
            return self
        row = list(self.metric_names).index(metric_name)
        baseline = None if self.baseline is None else self.baseline[row]
        names = [metric_name]
        return PatchingResult(
            self.values[row], self.axis_names, self.indices, names, self.reduced, baseline
        )

    def __getattr__(self, name: str) -> Any:
        hint = f" Use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"a PatchingResult has no {name!r}.{hint}")

    def mean(self) -> Float[Tensor, "..."]:
        """Return the mean over prompts."""
        return self.values if self.reduced else self.values.mean(-1)

    def stderr(self) -> Float[Tensor, "..."]:
        """Return the standard error of the mean over prompts.

        Raises:
            ValueError: rows were averaged already, or there is only one row.
        """
        if self.reduced or self.values.shape[-1] < 2:
            raise ValueError(
                "a standard error needs two prompts or more, which were not averaged: use"
                ' reduce="none"'
            )
        return self.values.std(-1) / self.values.shape[-1] ** 0.5

    def effect(self) -> Float[Tensor, "..."]:
        """Return the change of the corrupted run's metric that each patch causes.

        Raises:
            ValueError: the corrupted run was not measured.
        """
        return self.values - self._like_values(self.baseline)

    def normalized(self, clean_baseline: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the effect as a share of the difference between both runs: 0 is the corrupted run,
        1 the clean run.

        Args:
            clean_baseline: the metric of the clean run, of the shape of `baseline`.

        Raises:
            ValueError: the corrupted run was not measured, or the shape differs.
        """
        effect, before = self.effect(), self.baseline
        assert before is not None
        clean = torch.as_tensor(clean_baseline).to(before)
        if clean.shape != before.shape:
            raise ValueError(
                f"clean_baseline has shape {list(clean.shape)}; the corrupted run's"
                f" {list(before.shape)}"
            )
        return effect / self._like_values(clean - before)

    def _like_values(self, x: Tensor | None) -> Tensor:
        if x is None:
            raise ValueError("the unpatched run was not measured: use baseline=True")
        metrics = int(self.has_metric_axis)
        missing = [1] * (self.values.ndim - x.ndim)
        return x.view(*x.shape[:metrics], *missing, *x.shape[metrics:])


def data_frame(rows: Any, columns: Sequence[str]) -> Any:
    """Return a data frame of indices.

    Raises:
        ImportError: pandas is not installed; it is not one of this package's dependencies.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "data frames need pandas, which is not installed: pip install pandas"
        ) from error
    return pandas.DataFrame(rows, columns=list(columns))


# --------------------------------------------------------------------------------------------------
# Measurements of a patched run: one metric or several, one number or one for each row.
# --------------------------------------------------------------------------------------------------


#: From the logits ``[batch, pos, d_vocab]`` of a patched run to one number, or to one for each row.
Metric = Callable[[Float[Tensor, "batch pos d_vocab"]], Any]
#: How a metric's rows are reduced.
Reduce = Literal["scalar", "mean", "none"]


class Metrics:
    """The metrics of a sweep, called together.

    Args:
        metric: one metric, or several by name.
        reduce: as for `generic_activation_patch`.
        rows: the number of prompts.
        mask: ``[row, token]``, 0 for padding; None: no padding.

    Attributes:
        names: the names of the metrics.
        several: whether the metrics were passed by name.
        shape: the shape of a call's result: an axis of metrics, and one of rows if there is a
            number for each.

    Raises:
        ValueError: there is no metric, or one reads a position that is padding.
    """

    def __init__(
        self, metric: Metric | Mapping[str, Metric], reduce: Reduce, rows: int, mask: Tensor | None
    ) -> None:
        self.several = isinstance(metric, Mapping)
        self._metrics = dict(metric) if isinstance(metric, Mapping) else {"metric": metric}
        if not self._metrics:
            raise ValueError("patching_metric is an empty mapping: give one metric or more")
        for each in self._metrics.values():
            check_position(each, mask)
        self.names, self._reduce = tuple(self._metrics), reduce
        self.shape = (len(self.names),) if reduce == "scalar" else (len(self.names), rows)

    def __call__(self, logits: Tensor) -> Float[Tensor, "..."]:
        """Return the value of each metric for the logits of one run."""
        return torch.stack(
            [self._numbers(name, metric(logits)) for name, metric in self._metrics.items()]
        )

    @property
    def by_row(self) -> bool:
        """Tell whether the final form has a number for each row."""
        return self._reduce == "none"

    def reduced(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the metrics of each row in their final form, reduced as `reduce` says."""
        return values.mean(-1) if self._reduce == "mean" else values

    def _numbers(self, name: str, value: Any) -> Tensor:
        numbers, rows = torch.as_tensor(value).detach().cpu().double(), self.shape[1:]
        if rows and numbers.shape != rows:
            raise ValueError(
                f"the metric {name!r} returned a tensor of shape {list(numbers.shape)}; with"
                f" reduce={self._reduce!r} it must be {list(rows)}, a number for each row"
            )
        if numbers.numel() != 1 and not rows:
            raise ValueError(
                f"the metric returned a tensor of shape {list(numbers.shape)}; it must be a single"
                " number, or reduce='none' or 'mean' for one of each row"
            )
        return numbers.reshape(rows)


# --------------------------------------------------------------------------------------------------
# The pieces of an activation that a sweep patches: an index for each, starting with the layer.
# --------------------------------------------------------------------------------------------------


AXES = ("layer", "pos", "head_index", "head", "src_pos", "dest_pos", "feature")


@dataclass(frozen=True)
class Indices:
    """The indices of a sweep.

    Attributes:
        rows: all indices.
        tried: which of them exist in the model: some layers of a hybrid lack the activation or have
            fewer heads.
        axis_names: the axes of all combinations; empty for a data frame.
        sizes: the number of values of each of these axes.
        table: the data frame of the indices, if there is one.
    """

    rows: list[list[int]]
    tried: list[bool]
    axis_names: Sequence[str]
    sizes: Sequence[int]
    table: Any = None

    @classmethod
    def of(
        cls,
        model: TransformerBridge,
        tokens: Tensor,
        activation_name: str,
        axis_names: Sequence[str] | None,
        table: Any,
        clean_cache: Mapping[str, Tensor],
        n_groups: int | None = None,
    ) -> Indices:
        """Return all combinations along axes, or a data frame's rows; for the arguments see
        `generic_activation_patch`. With groups of positions, ``"pos"`` counts these.

        Raises:
            ValueError: neither or both ways to pass the indices.
        """
        if table is not None and axis_names is not None:
            raise ValueError(
                "give either index_axis_names or index_df: each of them says which indices to go"
                " through"
            )
        if table is not None:
            rows = [[int(i) for i in row] for row in table.itertuples(index=False, name=None)]
            return cls(rows, [True] * len(rows), (), (len(rows),), table)
        if axis_names is None:
            raise ValueError("give index_axis_names, or a data frame of indices as index_df")
        heads = {
            layer: _heads(model, activation_name, layer)
            for layer in _layers(model, activation_name)
        }
        sizes = [
            _size(model, tokens, activation_name, axis, heads, clean_cache)
            if axis != "pos" or n_groups is None
            else n_groups
            for axis in axis_names
        ]
        rows = [list(row) for row in itertools.product(*map(range, sizes))]
        at_head = [i for i, axis in enumerate(axis_names) if axis.startswith("head")]
        tried = [row[0] in heads and all(row[i] < heads[row[0]] for i in at_head) for row in rows]
        return cls(rows, tried, axis_names, sizes)

    @property
    def as_passed(self) -> Any:
        """Return the indices in the form that `PatchingResult` stores."""
        return self.rows if self.table is None else self.table

    def frame(self) -> Any:
        """Return the indices as a data frame.

        Raises:
            ImportError: pandas is not installed; it is not one of this package's dependencies.
        """
        return data_frame(self.rows, self.axis_names) if self.table is None else self.table


def _layers(model: TransformerBridge, activation_name: str) -> list[int]:
    """Return the layers that have an activation: only some layers of a hybrid model.

    Raises:
        UnknownHookError: no layer has the activation.
    """
    names = [act_name(activation_name, layer) for layer in range(model.cfg.n_layers)]
    known = model.hook_dict.keys() | model.names.aliases.keys()
    layers = [layer for layer, name in enumerate(names) if name in known]
    if not layers:
        model.names.find(names[0])
    return layers


def _size(
    model: TransformerBridge,
    tokens: Tensor,
    activation_name: str,
    axis: str,
    heads: Mapping[int, int],
    clean_cache: Mapping[str, Tensor],
) -> int:
    """Return the number of values of an index axis; `heads` has those of each layer."""
    if axis not in AXES:
        raise ValueError(
            f"there is no index axis {axis!r}; there are {', '.join(AXES)}.{suggestion(axis, AXES)}"
        )
    if axis == "layer":
        return model.cfg.n_layers
    if axis.endswith("pos"):
        return tokens.shape[1]
    if axis == "feature":
        hook = model.names.find(act_name(activation_name, min(heads)))
        if not hook.point.axes.endswith(" feature"):
            raise ValueError(
                f"{hook.name} has the axes [{hook.point.axes}]: only a point in a basis has"
                " features"
            )
        return clean_activation(clean_cache, hook).shape[-1]
    return max(heads.values())


def _heads(model: TransformerBridge, activation_name: str, layer: int) -> int:
    """Return the number of heads of an activation in a layer; in some models it differs between
    layers.
    """
    axes = model.names.find(act_name(activation_name, layer)).point.axes.split()
    name, heads = "n_heads", model.cfg.n_heads
    if "n_key_value_heads" in axes:
        name, heads = "n_key_value_heads", model.cfg.n_kv_heads
    attn = model.architecture.stack.block_at(layer).attn
    return attn.own(name, heads) if attn else heads


def clean_activation(clean_cache: Mapping[str, Tensor], hook: HookPoint) -> Tensor:
    """Return the clean run's activation at a hook point.

    Args:
        clean_cache: the cache of the clean run.
        hook: the hook point.

    Raises:
        KeyError: the activation was not cached.
    """
    if hook.name not in clean_cache:
        standard = hook.point.group == "standard"
        option = "by default" if standard else f"with names_filter={hook.name!r}"
        raise KeyError(
            f"the clean cache does not hold {hook.name}; run_with_cache(clean_tokens) caches it"
            f" {option}"
        )
    return clean_cache[hook.name]
