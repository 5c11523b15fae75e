"""Random weights by HookedTransformer's conventions: vectors on the right, heads on an axis of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bridge.hooks.arguments import check_choice

#: The order in which HookedTransformer has its matrices, and those of a block.
_IN_MODEL = ("embed", "pos_embed", "blocks", "unembed")
_IN_BLOCK = ("W_Q", "W_O", "W_K", "_W_K", "W_V", "_W_V", "W_in", "W_out", "W_gate")


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
    check_choice("mode", mode, ("fan_in", "fan_out"))
    fan = calc_fan_in_and_fan_out(param)[mode == "fan_out"]
    return gain * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


_FILLS: dict[str, Callable[..., Tensor]] = {
    "xavier_uniform": init_xavier_uniform_, "xavier_normal": init_xavier_normal_,
    "kaiming_uniform": init_kaiming_uniform_, "kaiming_normal": init_kaiming_normal_,
}  # fmt: skip


def draw(cfg: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Random matrices and their names, one after another: what HookedTransformer draws from the same random state.

    Args:
        cfg: says how: its `init_mode` and `initializer_range`.
        weights: all weights of a model, by HookedTransformer's names; those that are no matrices are left out.
    """

    def place(name: str) -> tuple[int, ...]:
        first, *middle, last = name.removesuffix(".weight").split(".")
        if first != "blocks":
            return (_IN_MODEL.index(first),)
        block, at = int(middle[0]), _IN_BLOCK.index(last)
        if "experts" in middle:  # one after another, and the router behind them
            return _IN_MODEL.index(first), block, _IN_BLOCK.index("W_in"), int(middle[-1]), at
        return _IN_MODEL.index(first), block, at, -1

    shapes = {name: weight for name, weight in weights if "W_" in name}
    for name in sorted(shapes, key=place):
        new = torch.empty(shapes[name].shape, dtype=shapes[name].dtype, device="cpu")
        if cfg.init_mode in _FILLS:
            _FILLS[cfg.init_mode](new, gain=cfg.initializer_range)
        elif cfg.init_mode == "muP":
            nn.init.normal_(new, std=1.0 if "embed" in name else calc_fan_in_and_fan_out(new)[0] ** -0.5)
        else:
            nn.init.normal_(new, std=cfg.initializer_range)
        yield name, new
