"""The modules that HookedTransformer keeps under `utilities`: devices and activation functions."""
