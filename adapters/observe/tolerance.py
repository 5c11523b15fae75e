"""What computed numbers may differ by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: What computed values may differ by, relative to the largest, for each type of numbers. Many models compute norms,
#: softmaxes and rotations in float32, whatever they are given.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 5e-6, torch.float32: 2e-5}
_HALF = 5e-2


def tolerance(of: Tensor | torch.dtype) -> float:
    """What values of a type of numbers may differ by, relative to the largest."""
    return TOLERANCES.get(of if isinstance(of, torch.dtype) else of.dtype, _HALF)
