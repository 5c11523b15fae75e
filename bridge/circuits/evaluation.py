"""How faithful a circuit is: what the model does when all other edges carry something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.edge_run import EdgeRun
from bridge.circuits.graph import Graph
from bridge.circuits.metrics import Metric
from bridge.circuits.senders import written
from bridge.hooks.arguments import check_choice

ABLATIONS = ("resample", "mean", "zero")


@dataclass(frozen=True)
class Evaluation:
    """What a circuit does.

    Attributes:
        model: the metric of the whole model.
        ablated: with every edge replaced.
        circuit: with every edge replaced but those of the circuit.
        complement: with the circuit's edges replaced.
        share: the circuit's part of all edges.
    """

    model: float
    ablated: float
    circuit: float
    complement: float
    share: float

    def _part(self, value: float) -> float:
        if self.model == self.ablated:
            raise ValueError(
                f"the metric is {self.model} with every edge and with none: there is nothing for a circuit to keep"
            )
        return (value - self.ablated) / (self.model - self.ablated)

    @property
    def faithfulness(self) -> float:
        """The circuit's part of what the model's metric is above that of no edges: 1 means all of it."""
        return self._part(self.circuit)

    @property
    def complement_faithfulness(self) -> float:
        """The same of all other edges: 0 means that nothing of it is left without the circuit."""
        return self._part(self.complement)


@dataclass(frozen=True)
class Curve:
    """Faithfulness against size.

    Attributes:
        shares: parts of all edges, from small to large.
        faithfulness: of the circuit of each size.
    """

    shares: tuple[float, ...]
    faithfulness: tuple[float, ...]

    @property
    def cpr(self) -> float:
        """The circuit performance ratio: the area under the curve (Mueller et al. 2025). Larger is better."""
        return self._area(self.faithfulness)

    @property
    def cmd(self) -> float:
        """The circuit-model distance: the area between the curve and 1 (Mueller et al. 2025). 0 is best."""
        return self._area([abs(1 - value) for value in self.faithfulness])

    def _area(self, values: Sequence[float]) -> float:
        """By trapezoids between the shares."""
        steps = zip(self.shares, self.shares[1:], values, values[1:], strict=False)
        return sum((right - left) * (a + b) / 2 for left, right, a, b in steps)


def evaluations(
    graph: Graph,
    masks: Sequence[Bool[Tensor, "receiver sender"]],
    bridge: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    ablation: str,
    reference: Int[Tensor, "rows length"] | None,
) -> list[Evaluation]:
    """What several circuits do; see `Circuit.evaluate`.

    Args:
        graph: their graph.
        masks: which edges each has.
        bridge, clean, corrupted, metric, ablation, reference: as there.

    Raises:
        ValueError: as there.
    """
    model_graph = Graph.of(bridge)
    if graph != model_graph:
        raise ValueError(f"the circuit is of {graph}, and this model is {model_graph}")
    if clean.shape != corrupted.shape:
        raise ValueError(f"clean tokens are {list(clean.shape)} and corrupted ones {list(corrupted.shape)}")
    other = _other(graph, bridge, corrupted, ablation, reference)
    with torch.no_grad():
        model = float(metric(bridge(clean)))
        ablated = float(metric(EdgeRun(graph, bridge, other, graph.exists[None]).logits(clean)[0]))
        found = []
        for mask in masks:
            replaced = torch.stack([graph.exists & ~mask, mask])
            alone, without = EdgeRun(graph, bridge, other, replaced).logits(clean)
            share = int(mask.sum()) / graph.n_edges
            found.append(Evaluation(model, ablated, float(metric(alone)), float(metric(without)), share))
    return found


def _other(
    graph: Graph,
    bridge: TransformerBridge,
    corrupted: Int[Tensor, "batch pos"],
    ablation: str,
    reference: Int[Tensor, "rows length"] | None,
) -> Float[Tensor, "sender batch_or_one pos d_model"]:
    """What replaces the senders."""
    check_choice("ablation", ablation, ABLATIONS)
    if reference is not None and ablation != "mean":
        raise ValueError(f"reference prompts are for the mean; the ablation is {ablation!r}")
    if ablation == "mean":
        tokens = corrupted if reference is None else reference
        if tokens.shape[1] != corrupted.shape[1]:
            raise ValueError(f"reference prompts have {tokens.shape[1]} tokens, and these {corrupted.shape[1]}")
        return written(graph, bridge, tokens).parts.mean(1, keepdim=True)
    parts = written(graph, bridge, corrupted).parts
    return parts if ablation == "resample" else torch.zeros_like(parts[:, :1])
