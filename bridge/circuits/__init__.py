"""Circuits: which edges of a model's computation graph a behaviour needs, and how much of it they keep.

Scores of edges come from `edge_effects` (exact) or `edge_attribution` (from gradients); `EdgeScores` chooses circuits
by them; `Circuit.evaluate` and `faithfulness_curve` say how faithful these are.
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
from bridge.circuits.circuits import SHARES, Circuit, EdgeScores, NodeScores, faithfulness_curve, joined
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
