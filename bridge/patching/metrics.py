"""What is measured of a patched run: one metric or several, one number or one for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

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
