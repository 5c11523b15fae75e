"""Whether two results are the same computation, done in another batch."""

from __future__ import annotations

import torch
from torch import Tensor

#: How far numbers of the same computation in another batch may be from each other, of the largest of them.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


def close(found: Tensor, right: Tensor) -> bool:
    """Whether two results are the same but for the rounding of another batch.

    Args:
        found: the one.
        right: the other.
    """
    tolerance = ROUNDING.get(right.dtype, 10 * torch.finfo(right.dtype).eps) * right.abs().max().item()
    return found.shape == right.shape and torch.allclose(found, right, rtol=0, atol=tolerance)
