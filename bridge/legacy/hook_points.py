"""`HookPoint` and `HookedRootModule`: hook points in torch modules that a user writes.

A Hugging Face model needs none of this: its hook points are `bridge.HookPoint`. These are for a user's own modules: a
toy model, or a wrapper that is put into a model (see `HookedTransformer.setup`).
"""

from bridge.legacy.point import HookFunction, HookPoint, LensHandle
from bridge.legacy.root_module import HookedRootModule, NamesFilter

__all__ = ["HookFunction", "HookPoint", "HookedRootModule", "LensHandle", "NamesFilter"]
