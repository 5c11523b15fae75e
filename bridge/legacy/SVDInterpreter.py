"""The module that HookedTransformer code imports `SVDInterpreter` from."""

from bridge.svd import VECTOR_TYPES, SVDInterpreter

__all__ = ["VECTOR_TYPES", "SVDInterpreter"]
