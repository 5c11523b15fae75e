"""A small transformer with random weights for toy models, in place of `HookedTransformer(cfg)`."""

from transformers import AutoConfig, AutoModelForCausalLM

from bridge.native.native import NativeConfig, NativeModel

# Register the model, so that a saved one loads from its folder alone. `exist_ok`: the module may be
# imported again in a notebook.
AutoConfig.register(NativeConfig.model_type, NativeConfig, exist_ok=True)
AutoModelForCausalLM.register(NativeConfig, NativeModel, exist_ok=True)

__all__ = ["NativeConfig", "NativeModel"]
