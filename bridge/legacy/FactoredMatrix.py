"""The module that HookedTransformer code imports `FactoredMatrix` from."""

from bridge.weights.factored_matrix import FactoredMatrix

__all__ = ["FactoredMatrix"]
