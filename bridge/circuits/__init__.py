"""Circuits: which edges of a model's computation graph a behaviour needs, and how much of it they keep.

Scores of edges come from `edge_effects` (exact) or `edge_attribution` (from gradients); `EdgeScores` chooses circuits
by them; `Circuit.evaluate` and `faithfulness_curve` say how faithful these are.
"""

from bridge.circuits.attribution import edge_attribution, mean_scores
from bridge.circuits.circuit import Circuit
from bridge.circuits.curves import SHARES, faithfulness_curve
from bridge.circuits.evaluation import Curve, Evaluation
from bridge.circuits.exact import edge_effects, path_patching
from bridge.circuits.graph import Graph, LayerShape
from bridge.circuits.metrics import Metric, kl_divergence, logit_difference
from bridge.circuits.scores import EdgeScores

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
    "kl_divergence",
    "logit_difference",
    "mean_scores",
    "path_patching",
]
