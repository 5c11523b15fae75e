"""Random weights by HookedTransformer's conventions: vectors on the right, heads on an axis of their own."""

from __future__ import annotations

import math
from typing import Any

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
    bound = gain * math.sqrt(6 / sum(calc_fan_in_and_fan_out(param)))
    return nn.init.uniform_(param, -bound, bound)


def init_xavier_normal_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fills a weight with normal values of variance ``2 / (inputs + outputs)``, and returns it."""
    return nn.init.normal_(param, std=gain * math.sqrt(2 / sum(calc_fan_in_and_fan_out(param))))


def init_kaiming_uniform_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Fills a weight with uniform values of variance ``gain(nonlinearity)**2 / inputs``, and returns it."""
    bound = math.sqrt(3) * _kaiming_std(param, a, nonlinearity, gain, mode)
    return nn.init.uniform_(param, -bound, bound)


def init_kaiming_normal_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Fills a weight with normal values of variance ``gain(nonlinearity)**2 / inputs``, and returns it."""
    return nn.init.normal_(param, std=_kaiming_std(param, a, nonlinearity, gain, mode))


def _kaiming_std(param: Tensor, a: float, nonlinearity: Any, gain: float, mode: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f'mode is {mode!r}; it must be "fan_in" or "fan_out"')
    fan = calc_fan_in_and_fan_out(param)[mode == "fan_out"]
    return gain * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
