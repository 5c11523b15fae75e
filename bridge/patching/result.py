"""`PatchingResult`: what a sweep measured for each prompt, for several metrics, or with the unpatched run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import act_name, suggestion

#: What results of TransformerLens have besides, and what to use.
_ELSEWHERE = {
    "bootstrap_ci": "scipy.stats.bootstrap on the last axis of values or effect()",
    "permutation_pvalue": "scipy.stats.permutation_test(permutation_type='samples') on the last axis of effect()",
    "to_dataframe": "index_df, and values",
    "patch_type_names": "the functions that patch several kinds of activations return tensors",
}


@dataclass(frozen=True)
class PatchingResult:
    """What `generic_activation_patch` measured, where that is more than one number for each patch.

    Attributes:
        values: the metric of each patch, ``[metric, ..., batch]``: the first axis where there are several metrics, the
            last where rows were not averaged.
        axis_names: the axes between them, the layer first; of a data frame's rows, none.
        indices: what was gone through: a row of indices for each patch, or the data frame that was given.
        metric_names: the metrics.
        reduced: whether values are without an axis of rows.
        baseline: the metric of the unpatched run, ``[metric, batch]``, where it was asked for.
        has_metric_axis: whether there are several metrics.

    Example:
        >>> import torch
        >>> from bridge.patching import PatchingResult
        >>> found = PatchingResult(torch.tensor([[1.0, 3.0]]), ("layer",), [[0]], ("metric",), False, torch.ones(2))
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

    @property
    def index_df(self) -> Any:
        """The data frame of indices.

        Raises:
            ImportError: pandas is not installed; it is not one of this package's dependencies.
        """
        return self.indices if hasattr(self.indices, "itertuples") else data_frame(self.indices, self.axis_names)

    def __getitem__(self, metric_name: str) -> PatchingResult:
        """One metric's result.

        Raises:
            KeyError: there is no such metric.
        """
        if metric_name not in self.metric_names:
            raise KeyError(f"there is no metric {metric_name!r}; there are {', '.join(self.metric_names)}")
        if not self.has_metric_axis:
            return self
        at = list(self.metric_names).index(metric_name)
        before = None if self.baseline is None else self.baseline[at]
        return replace(self, values=self.values[at], metric_names=[metric_name], baseline=before, has_metric_axis=False)

    def __getattr__(self, name: str) -> Any:
        hint = f" Use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"a PatchingResult has no {name!r}.{hint}")

    def mean(self) -> Float[Tensor, "..."]:
        """The mean over prompts."""
        return self.values if self.reduced else self.values.mean(-1)

    def stderr(self) -> Float[Tensor, "..."]:
        """The standard error of that mean.

        Raises:
            ValueError: rows were averaged already, or there is one alone.
        """
        if self.reduced or self.values.shape[-1] < 2:
            raise ValueError('a standard error needs two prompts or more, which were not averaged: use reduce="none"')
        return self.values.std(-1) / self.values.shape[-1] ** 0.5

    def effect(self) -> Float[Tensor, "..."]:
        """By how much each patch changes the metric of the corrupted run.

        Raises:
            ValueError: that run was not measured.
        """
        return self.values - self._like_values(self.baseline)

    def normalized(self, clean_baseline: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The effect as a share of what lies between the corrupted and the clean run: 0 is the corrupted run, 1 the
        clean one.

        Args:
            clean_baseline: the metric of the clean run, of the shape of `baseline`.

        Raises:
            ValueError: the corrupted run was not measured, or the shape differs.
        """
        effect, before = self.effect(), self.baseline
        assert before is not None
        clean = torch.as_tensor(clean_baseline).to(before)
        if clean.shape != before.shape:
            raise ValueError(f"clean_baseline has shape {list(clean.shape)}; the corrupted run's {list(before.shape)}")
        return effect / self._like_values(clean - before)

    def _like_values(self, x: Tensor | None) -> Tensor:
        if x is None:
            raise ValueError("the unpatched run was not measured: use baseline=True")
        missing = [1] * (self.values.ndim - x.ndim)
        return x.view(*x.shape[: int(self.has_metric_axis)], *missing, *x.shape[int(self.has_metric_axis) :])


def data_frame(rows: Any, columns: Sequence[str]) -> Any:
    """A data frame of indices.

    Raises:
        ImportError: pandas is not installed; it is not one of this package's dependencies.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("data frames need pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame(rows, columns=list(columns))


# ----------------------------------------------------------------------------------------------------------------------
# What is measured of a patched run: one metric or several, one number or one for each row.
# ----------------------------------------------------------------------------------------------------------------------


#: From the logits ``[batch, pos, d_vocab]`` of a patched run to one number, or to one for each row.
Metric = Callable[[Float[Tensor, "batch pos d_vocab"]], Any]
#: What becomes of a metric's rows.
Reduce = Literal["scalar", "mean", "none"]


class Metrics:
    """The metrics of a sweep, called together.

    Args:
        metric: one, or several by name.
        reduce: as for `generic_activation_patch`.
        rows: how many prompts there are.

    Attributes:
        names: their names.
        several: whether there are names, rather than one metric.
        shape: what calling it gives: an axis of metrics, and one of rows where there is a number for each.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, metric: Metric | Mapping[str, Metric], reduce: Reduce, rows: int) -> None:
        self.several = isinstance(metric, Mapping)
        self._metrics = dict(metric) if isinstance(metric, Mapping) else {"metric": metric}
        if not self._metrics:
            raise ValueError("patching_metric is an empty mapping: give one metric or more")
        self.names, self._reduce = tuple(self._metrics), reduce
        self.shape = (len(self.names),) if reduce == "scalar" else (len(self.names), rows)

    def __call__(self, logits: Tensor) -> Float[Tensor, "..."]:
        """What each makes of the logits of one run."""
        return torch.stack([self._numbers(name, metric(logits)) for name, metric in self._metrics.items()])

    def reduced(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Numbers of each row, as they are returned."""
        return values.mean(-1) if self._reduce == "mean" else values

    def _numbers(self, name: str, value: Any) -> Tensor:
        made, wanted = torch.as_tensor(value).detach().cpu().double(), self.shape[1:]
        if wanted and made.shape != wanted:
            raise ValueError(
                f"the metric {name!r} returned a tensor of shape {list(made.shape)}; with reduce={self._reduce!r} it "
                f"must be {list(wanted)}, a number for each row"
            )
        if made.numel() != 1 and not wanted:
            raise ValueError(
                f"the metric returned a tensor of shape {list(made.shape)}; it must be a single number, or "
                "reduce='none' or 'mean' for one of each row"
            )
        return made.reshape(wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Which pieces of an activation a sweep patches: an index for each, the layer first.
# ----------------------------------------------------------------------------------------------------------------------


AXES = ("layer", "pos", "head_index", "head", "src_pos", "dest_pos", "feature")


@dataclass(frozen=True)
class Indices:
    """The indices of a sweep.

    Attributes:
        rows: all of them.
        tried: which of them the model has: of a hybrid's layers some have no such activation, or fewer heads.
        axis_names: what they go through in all combinations; of a data frame, nothing.
        sizes: how many values each of these axes has.
        table: the data frame that they are from.
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
    ) -> Indices:
        """All combinations along axes, or a data frame's rows; the arguments are those of `generic_activation_patch`.

        Raises:
            ValueError: neither is given, or both.
        """
        if table is not None and axis_names is not None:
            raise ValueError("give either index_axis_names or index_df: each of them says which indices to go through")
        if table is not None:
            rows = [[int(i) for i in row] for row in table.itertuples(index=False, name=None)]
            return cls(rows, [True] * len(rows), (), (len(rows),), table)
        if axis_names is None:
            raise ValueError("give index_axis_names, or a data frame of indices as index_df")
        there = _layers(model, activation_name)
        sizes = [_size(model, tokens, activation_name, axis, there, clean_cache) for axis in axis_names]
        rows = [list(row) for row in itertools.product(*map(range, sizes))]
        heads = {layer: _heads(model, activation_name, layer) for layer in there}
        at_head = [i for i, axis in enumerate(axis_names) if axis.startswith("head")]
        tried = [row[0] in there and all(row[i] < heads[row[0]] for i in at_head) for row in rows]
        return cls(rows, tried, axis_names, sizes)

    @property
    def given(self) -> Any:
        """They as a `PatchingResult` holds them."""
        return self.rows if self.table is None else self.table

    def frame(self) -> Any:
        """They as a data frame.

        Raises:
            ImportError: pandas is not installed; it is not one of this package's dependencies.
        """
        return data_frame(self.rows, self.axis_names) if self.table is None else self.table


def _layers(model: TransformerBridge, activation_name: str) -> list[int]:
    """The layers that have an activation: of hybrids, some.

    Raises:
        UnknownHookError: none has.
    """
    names = [act_name(activation_name, layer) for layer in range(model.cfg.n_layers)]
    found = [layer for layer, name in enumerate(names) if name in model.hook_dict or name in model.names.aliases]
    if not found:
        model.names.find(names[0])
    return found


def _size(
    model: TransformerBridge,
    tokens: Tensor,
    activation_name: str,
    axis: str,
    there: Sequence[int],
    clean_cache: Mapping[str, Tensor],
) -> int:
    """How many values an index axis has."""
    if axis not in AXES:
        raise ValueError(f"there is no index axis {axis!r}; there are {', '.join(AXES)}.{suggestion(axis, AXES)}")
    if axis == "layer":
        return model.cfg.n_layers
    if axis.endswith("pos"):
        return tokens.shape[1]
    if axis == "feature":
        hook = model.names.find(act_name(activation_name, there[0]))
        if not hook.point.axes.endswith(" feature"):
            raise ValueError(f"{hook.name} has the axes [{hook.point.axes}]: only a point in a basis has features")
        return clean_activation(clean_cache, hook).shape[-1]
    return max(_heads(model, activation_name, layer) for layer in there)


def _heads(model: TransformerBridge, activation_name: str, layer: int) -> int:
    """How many heads an activation has in a layer: some models have more in one than in another."""
    axes = model.names.find(act_name(activation_name, layer)).point.axes.split()
    attn = model.architecture.stack.block_at(layer).attn
    if "n_key_value_heads" in axes:
        return attn.own("n_key_value_heads", model.cfg.n_kv_heads) if attn else model.cfg.n_kv_heads
    return attn.own("n_heads", model.cfg.n_heads) if attn else model.cfg.n_heads


def clean_activation(clean_cache: Mapping[str, Tensor], hook: HookPoint) -> Tensor:
    """The clean run's activation.

    Args:
        clean_cache: of that run.
        hook: the hook point.

    Raises:
        KeyError: it was not cached.
    """
    if hook.name not in clean_cache:
        how = "by default" if hook.point.group == "standard" else f"with names_filter={hook.name!r}"
        raise KeyError(f"the clean cache does not hold {hook.name}; run_with_cache(clean_tokens) caches it {how}")
    return clean_cache[hook.name]
