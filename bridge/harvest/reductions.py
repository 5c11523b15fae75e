"""What is made of activations before anything is written: fewer rows, or fewer numbers in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from bridge.harvest.errors import HarvestError
from bridge.harvest.fingerprint import of_value


class Reduction(Protocol):
    """Makes columns of an activation's rows."""

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """The columns, by name.

        Args:
            name: the hook point's name.
            rows: the activation, ``[row, ...]``.
        """

    def describe(self) -> Any:
        """What it is, for the manifest: plain data that differs when the result would."""


@dataclass(frozen=True, eq=False)
class Project:
    """A linear map of the activation (of its last axes, as many as the matrix has but one).

    Args:
        matrix: ``[..., d_out]``.

    Example:
        >>> import torch
        >>> from bridge.harvest import Project
        >>> Project(torch.ones(4, 2)).columns("x", torch.ones(3, 4))["x"].shape
        torch.Size([3, 2])
    """

    matrix: Float[Tensor, "*d_in d_out"]

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """See `Reduction`."""
        inner = self.matrix.shape[:-1]
        if not inner or tuple(rows.shape[-len(inner) :]) != tuple(inner) or rows.ndim <= len(inner):
            raise HarvestError(
                f"the projection of {name} takes {list(inner)}; the activation's rows are {list(rows.shape[1:])}"
            )
        dtype = torch.promote_types(rows.dtype, self.matrix.dtype)  # neither is rounded
        matrix = self.matrix.to(rows.device, dtype).reshape(-1, self.matrix.shape[-1])
        flat = rows.reshape(*rows.shape[: rows.ndim - len(inner)], -1)
        return {name: flat.to(dtype) @ matrix}

    def describe(self) -> Any:
        """See `Reduction`."""
        return ["project", list(self.matrix.shape), of_value(self.matrix)]


@dataclass(frozen=True, eq=False)
class TopK:
    """The largest values of a function of the activation, and where they are: a sparse code's active features, say.

    Columns ``{name}.values`` ``[k]``, from the largest, and ``{name}.indices`` ``[k]``.

    Args:
        k: how many.
        function: from an activation's rows ``[row, ...]`` to ``[row, feature]``; None: the activation itself.

    Example:
        >>> import torch
        >>> from bridge.harvest import TopK
        >>> TopK(1, lambda x: x * 2).columns("x", torch.tensor([[1.0, 3.0, 2.0]]))
        {'x.values': tensor([[6.]]), 'x.indices': tensor([[1]])}
    """

    k: int
    function: Callable[[Tensor], Tensor] | None = None

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """See `Reduction`."""
        scores = rows if self.function is None else self.function(rows)
        if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(rows):
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise HarvestError(
                f"TopK's function at {name} gave {got} for rows {list(rows.shape)}; it must give [row, feature]"
            )
        if not 1 <= self.k <= scores.shape[1]:
            raise HarvestError(f"TopK's k at {name} is {self.k}; there are {scores.shape[1]} features")
        best = scores.topk(self.k, dim=1)
        return {f"{name}.values": best.values, f"{name}.indices": best.indices}

    def describe(self) -> Any:
        """See `Reduction`."""
        return ["top_k", self.k, of_value(self.function)]


@dataclass(frozen=True, eq=False)
class TopPositions:
    """Of each document in an input, only the positions at which a function of one activation is largest.

    Args:
        k: how many positions (all of a shorter one).
        point: the hook point that is looked at, one of those harvested.
        function: from its rows ``[row, ...]`` to ``[row]``.
    """

    k: int
    point: str
    function: Callable[[Tensor], Tensor]

    def describe(self) -> Any:
        """What it is, for the manifest."""
        return ["top_positions", self.k, self.point, of_value(self.function)]


#: Which rows are written: of every token, one for each document in an input (the mean, or the last token), or see
#: `TopPositions`.
Rows = Literal["all", "mean", "last"] | TopPositions


@dataclass
class ChosenRows:
    """Which rows of a batch are written.

    Attributes:
        kept: ``[kept]``, the row whose ids stand for each row that is written.
        groups: ``[row]``, which written row a row goes into, for a mean; None where rows are only chosen.
    """

    kept: Int[Tensor, "kept"]
    groups: Int[Tensor, "row"] | None = None

    def apply(self, rows: Shaped[Tensor, "row *shape"]) -> Tensor:
        """The rows that are written.

        Args:
            rows: ``[row, ...]``, of every token.
        """
        if self.groups is None:
            return rows if len(self.kept) == len(rows) else rows[self.kept.to(rows.device)]
        if not rows.is_floating_point():
            raise HarvestError("a mean of whole numbers is no activation: leave that hook point out, or use rows='all'")
        groups = self.groups.to(rows.device)
        # A sum may lie beyond what the type holds, where the mean does not.
        dtype = torch.float32 if rows.device.type == "mps" else torch.float64
        sums = torch.zeros((len(self.kept), *rows.shape[1:]), dtype=dtype, device=rows.device)
        sums.index_add_(0, groups, rows.to(dtype))
        counts = torch.bincount(groups, minlength=len(self.kept)).to(sums.dtype)
        return sums / counts.reshape(-1, *[1] * (rows.ndim - 1))


def choose(rows: Rows, segments: Int[Tensor, "row"], activations: dict[str, Tensor]) -> ChosenRows:
    """Which rows of a batch are written.

    Args:
        rows: see `Rows`.
        segments: ``[row]``, numbers that change whenever another document or input begins.
        activations: each hook point's rows ``[row, ...]``.

    Raises:
        HarvestError: a function that gives something else than ``[row]``.
    """
    if rows == "all":
        return ChosenRows(torch.arange(len(segments)))
    _, groups, sizes = torch.unique_consecutive(segments, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0) - 1
    if rows == "last":
        return ChosenRows(last)
    if rows == "mean":
        return ChosenRows(last, groups)
    assert isinstance(rows, TopPositions)
    scores = rows.function(activations[rows.point])
    if not isinstance(scores, Tensor) or scores.shape != segments.shape:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise HarvestError(f"the function of TopPositions gave {got} for {len(segments)} rows; it must give [row]")
    scores = scores.cpu()
    kept = []
    for start, size in zip((last + 1 - sizes).tolist(), sizes.tolist(), strict=True):
        best = scores[start : start + size].topk(min(rows.k, size)).indices
        kept.append(start + best.sort().values)
    return ChosenRows(torch.cat(kept) if kept else last)
