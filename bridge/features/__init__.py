"""Analysis in a basis: feature attribution and graphs, interchange interventions, directions."""

from bridge.features.directions import Direction, direction, write_into_weights, written_points
from bridge.features.features import (
    evaluate_features,
    feature_attribution,
    feature_logit_attrs,
    token_attribution,
)
from bridge.features.graph import (
    AttributionGraph,
    HeadLoadings,
    Node,
    ScoreTerms,
    attribution_graph,
    head_loadings,
    score_terms,
)
from bridge.features.interchange import (
    CoordinateMask,
    InterchangeTable,
    RotationFit,
    fit_rotation,
    interchange,
    interchange_table,
)

__all__ = [
    "AttributionGraph",
    "CoordinateMask",
    "Direction",
    "HeadLoadings",
    "InterchangeTable",
    "Node",
    "RotationFit",
    "ScoreTerms",
    "attribution_graph",
    "direction",
    "evaluate_features",
    "feature_attribution",
    "feature_logit_attrs",
    "fit_rotation",
    "head_loadings",
    "interchange",
    "interchange_table",
    "score_terms",
    "token_attribution",
    "write_into_weights",
    "written_points",
]
