"""Faithfulness of circuits of growing size."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.evaluation import Curve, evaluations
from bridge.circuits.metrics import Metric
from bridge.circuits.scores import EdgeScores
from bridge.hooks.arguments import check_choice, refuse_wrong_types

#: The shares of the edges at which the Mechanistic Interpretability Benchmark looks.
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@refuse_wrong_types
def faithfulness_curve(
    scores: EdgeScores,
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    ablation: str = "resample",
    shares: Sequence[float] = SHARES,
    choose: str = "top",
    absolute: bool = True,
    reference: Int[Tensor, "rows length"] | None = None,
) -> Curve:
    """The faithfulness of circuits of growing size, whose areas are the benchmark's CPR and CMD.

    Args:
        scores: what the circuits are chosen by.
        bridge, clean, corrupted, metric, ablation, reference: as for `Circuit.evaluate`.
        shares: parts of all edges.
        choose: ``"top"`` or ``"greedy"``.
        absolute: as for `EdgeScores.top`.

    Raises:
        ValueError: as `Circuit.evaluate`; or an unknown way to choose; or shares that do not grow from 0 to 1.

    Example:
        >>> from bridge.circuits import Curve
        >>> curve = Curve((0.0, 0.5, 1.0), (0.0, 1.0, 1.0))
        >>> curve.cpr, curve.cmd
        (0.75, 0.25)
    """
    check_choice("choose", choose, ("top", "greedy"))
    if not shares or not shares[0] >= 0 or not shares[-1] <= 1 or list(shares) != sorted(set(shares)):
        raise ValueError(f"shares are {tuple(shares)}; they must grow, from 0 to 1")
    pick = scores.top if choose == "top" else scores.greedy
    masks = [pick(round(share * scores.graph.n_edges), absolute).mask for share in shares]
    found = evaluations(scores.graph, masks, bridge, clean, corrupted, metric, ablation, reference)
    return Curve(tuple(shares), tuple(one.faithfulness for one in found))
