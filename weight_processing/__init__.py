"""Exact changes of a transformer's weights that make them easier to read: pure functions on canonical weights.

Names, shapes and orientation are HookedTransformer's (``W_Q`` is ``[head, d_model, d_head]``, and so on).
"""

from weight_processing.center_unembed import center_unembed
from weight_processing.center_writing_weights import center_writing_weights
from weight_processing.fold_layer_norm import fold_layer_norm
from weight_processing.fold_value_biases import fold_value_biases
from weight_processing.refactor_factored_attn_matrices import refactor_query_key, refactor_value_output

__all__ = [
    "center_unembed",
    "center_writing_weights",
    "fold_layer_norm",
    "fold_value_biases",
    "refactor_query_key",
    "refactor_value_output",
]
