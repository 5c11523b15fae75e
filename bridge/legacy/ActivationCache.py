"""The module that HookedTransformer code imports `ActivationCache` from."""

from bridge.cache.activation_cache import ActivationCache

__all__ = ["ActivationCache"]
