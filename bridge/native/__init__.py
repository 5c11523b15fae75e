"""A small transformer with random weights, for studies of toy models: what `HookedTransformer(cfg)` is used for."""

from transformers import AutoConfig, AutoModelForCausalLM

from bridge.native.native import NativeConfig, NativeModel

# So that a saved one loads by its folder alone. `exist_ok`: the module may be imported anew in a notebook.
AutoConfig.register(NativeConfig.model_type, NativeConfig, exist_ok=True)
AutoModelForCausalLM.register(NativeConfig, NativeModel, exist_ok=True)

__all__ = ["NativeConfig", "NativeModel"]
