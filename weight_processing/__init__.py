"""Exact transforms of a transformer's weights that make them easier to interpret: pure functions on
canonical weights.

Names, shapes and orientation are HookedTransformer's (``W_Q`` is ``[head, d_model, d_head]``, and
so on).
"""

from weight_processing.transforms import (
    center_unembed,
    center_writing_weights,
    fold_layer_norm,
    fold_value_biases,
    refactor_query_key,
    refactor_value_output,
)

__all__ = [
    "center_unembed",
    "center_writing_weights",
    "fold_layer_norm",
    "fold_value_biases",
    "refactor_query_key",
    "refactor_value_output",
]
