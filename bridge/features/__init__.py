"""What is found in a basis: attribution to features, their graph, interchange interventions, subspaces, directions."""

from bridge.features.attribution import feature_attribution
from bridge.features.graph import AttributionGraph, Node, attribution_graph

__all__ = ["AttributionGraph", "Node", "attribution_graph", "feature_attribution"]
