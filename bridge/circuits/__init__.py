"""Circuits: the edges of a computation graph that a behaviour needs, and their faithfulness.

`edge_effects` (exact) and `edge_attribution` (from gradients) compute scores of edges. `EdgeScores`
selects circuits by score. `Circuit.evaluate` and `faithfulness_curve` measure their faithfulness.
"""

from bridge.circuits.attribution import (
    edge_attribution,
    edge_effects,
    information_flow,
    mean_scores,
    node_attribution,
    node_effects,
    path_patching,
    trained_edges,
)
from bridge.circuits.circuits import (
    SHARES,
    Circuit,
    EdgeScores,
    NodeScores,
    faithfulness_curve,
    joined,
)
from bridge.circuits.edge_runs import Curve, Evaluation, mean_outputs
from bridge.circuits.graph import Graph, LayerShape, Metric, kl_divergence, logit_difference

__all__ = [
    "SHARES",
    "Circuit",
    "Curve",
    "EdgeScores",
    "Evaluation",
    "Graph",
    "LayerShape",
    "Metric",
    "NodeScores",
    "edge_attribution",
    "edge_effects",
    "faithfulness_curve",
    "information_flow",
    "joined",
    "kl_divergence",
    "logit_difference",
    "mean_outputs",
    "mean_scores",
    "node_attribution",
    "node_effects",
    "path_patching",
    "trained_edges",
]
