"""`PatchingResult`: what a sweep measured for each prompt, for several metrics, or with the unpatched run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

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
