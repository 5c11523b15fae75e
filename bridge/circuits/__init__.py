"""Circuits: which edges of a model's computation graph a behaviour needs, and how much of it they keep.

Scores of edges come from `edge_effects` (exact) or `edge_attribution` (from gradients); `EdgeScores` chooses circuits
by them; `Circuit.evaluate` and `faithfulness_curve` say how faithful these are.
"""

from bridge.circuits.attribution import (
    edge_attribution,
    edge_effects,
    information_flow,
    mean_scores,
    path_patching,
)
from bridge.circuits.circuits import SHARES, Circuit, EdgeScores, faithfulness_curve
from bridge.circuits.edge_runs import Curve, Evaluation
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
    "edge_attribution",
    "edge_effects",
    "faithfulness_curve",
    "information_flow",
    "kl_divergence",
    "logit_difference",
    "mean_scores",
    "path_patching",
]
