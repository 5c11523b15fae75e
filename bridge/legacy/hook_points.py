"""`HookPoint` and `HookedRootModule`: hook points in torch modules that a user writes.

A Hugging Face model needs none of this: its hook points are `bridge.HookPoint`. These are for a user's own modules: a
toy model, or a wrapper that is put into a model (see `HookedTransformer.setup`).
"""

import torch

from bridge.legacy.point import HookFunction, HookPoint, LensHandle
from bridge.legacy.root_module import HookedRootModule, NamesFilter

__all__ = ["DeviceType", "HookFunction", "HookPoint", "HookedRootModule", "LensHandle", "NamesFilter"]

#: Where something is to be, or None for where it is.
DeviceType = torch.device | None
