"""The module that HookedTransformer code imports `FactoredMatrix` from."""

from bridge.factored_matrix import FactoredMatrix

__all__ = ["FactoredMatrix"]
