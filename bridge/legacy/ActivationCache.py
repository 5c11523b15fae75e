"""The module that HookedTransformer code imports `ActivationCache` from."""

from bridge.cache import ActivationCache

__all__ = ["ActivationCache"]
