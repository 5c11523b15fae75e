"""Random weights by HookedTransformer's conventions: vectors on the right, heads on an axis of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def calc_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """How many inputs and outputs a weight has, by its shape."""
    shape = tuple(tensor.shape)
    if len(shape) == 1:
        return 1, shape[0]
    if len(shape) == 2:
        return shape
    if len(shape) == 3:
        return shape[1], shape[0] * shape[2]
    raise ValueError(f"a weight has one, two or three axes; this one's shape is {list(shape)}")


def init_xavier_uniform_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fills a weight with uniform values of variance ``2 / (inputs + outputs)``, and returns it."""
    return _as_a_matrix(param, nn.init.xavier_uniform_, gain)


def init_xavier_normal_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fills a weight with normal values of variance ``2 / (inputs + outputs)``, and returns it."""
    return _as_a_matrix(param, nn.init.xavier_normal_, gain)


def init_kaiming_uniform_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: Any = "fan_in"
) -> Tensor:
    """Fills a weight with uniform values of variance ``gain(nonlinearity)**2 / inputs``, and returns it."""
    return _as_a_matrix(param, nn.init.kaiming_uniform_, gain, a=a, mode=mode, nonlinearity=nonlinearity)


def init_kaiming_normal_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: Any = "fan_in"
) -> Tensor:
    """Fills a weight with normal values of variance ``gain(nonlinearity)**2 / inputs``, and returns it."""
    return _as_a_matrix(param, nn.init.kaiming_normal_, gain, a=a, mode=mode, nonlinearity=nonlinearity)


@torch.no_grad()
def _as_a_matrix(param: Tensor, fill: Callable[..., Tensor], gain: float, **options: Any) -> Tensor:
    """What torch draws for a matrix with as many inputs and outputs."""
    into, out = calc_fan_in_and_fan_out(param)
    return param.copy_(gain * fill(param.new_empty(out, into), **options).view(param.shape))
