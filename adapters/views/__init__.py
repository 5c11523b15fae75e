"""Views: how the tensor at a site is seen as a canonical activation, and how a new value is written back.

A view has ``get(x, call)`` (site tensor to activation) and ``put(x, new, call)`` (site tensor and new activation to new
site tensor). `call` describes the module call in progress; most views ignore it. ``put(x, get(x))`` equals ``x``.
"""

from adapters.views.attention import (
    AlibiScores,
    Biased,
    FilledScores,
    Heads,
    HeadsFirst,
    HeadsOfBatch,
    MaskedScores,
    OneHead,
    Patches,
    Selected,
    SinkPattern,
    SinkScores,
    columns,
    gathered,
    interleaved,
)
from adapters.views.views import (
    Adjusted,
    Affine,
    Args,
    Branch,
    Call,
    Chain,
    Composed,
    Copied,
    Deferred,
    Derived,
    FlatRows,
    Kwargs,
    PositionsFirst,
    Rows,
    Scaled,
    SeveralStreams,
    View,
    WithBatchAxis,
    WriteThrough,
    constant_of,
    linearly,
    parameters_of,
    split,
    through,
    times,
    transformed,
)

__all__ = [
    "Adjusted", "Affine", "AlibiScores", "Args", "Biased", "Branch", "Call", "Chain", "Composed", "Copied",
    "Deferred", "Derived", "FilledScores", "FlatRows", "Heads", "HeadsFirst", "HeadsOfBatch", "Kwargs",
    "MaskedScores", "OneHead", "Patches", "PositionsFirst", "Rows", "Scaled", "Selected", "SeveralStreams",
    "SinkPattern", "SinkScores", "View", "WithBatchAxis", "WriteThrough", "columns", "constant_of", "gathered",
    "interleaved", "linearly", "parameters_of", "split", "through", "times", "transformed",
]  # fmt: skip
