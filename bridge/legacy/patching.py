"""``transformer_lens.patching``'s names."""

from typing import Literal

from torch import Tensor

from bridge.legacy.table import named
from bridge.patching import *  # noqa: F403
from bridge.patching import __all__ as __all__

#: What stands in annotations: a model's output, activations, and the axes of a table of patches.
Logits = Tensor
CorruptedActivation = Tensor
PatchedActivation = Tensor
AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]

__getattr__ = named(__name__)
