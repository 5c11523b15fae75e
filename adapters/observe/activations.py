"""What activation functions compute, by the names that configurations have for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from adapters.imports.versions import clamp_of


def function_of(act_fn: str | None) -> Callable[[Tensor], Tensor] | None:
    """What an activation function computes, by `cfg.act_fn`; None for a name that nobody knows."""
    if act_fn in ("solu", "solu_ln"):
        return lambda x: x * x.softmax(-1)
    # It makes the function when it is asked with brackets, and only then.
    return None if act_fn is None or act_fn not in ACT2FN else ACT2FN[act_fn]


def product(act_fn: str | None, pre: Tensor, linear: Tensor | None, config: PreTrainedConfig) -> Tensor | None:
    """What an activation function makes of what enters it and the other projection; None for an unknown name."""
    if act_fn == "clamped_swiglu" and linear is not None:
        limit, alpha = clamp_of(config)
        clamped = pre.clamp(max=limit)
        return (linear.clamp(-limit, limit) + 1) * clamped * (alpha * clamped).sigmoid()
    function = function_of(act_fn)
    if function is None:
        return None
    return function(pre) if linear is None else function(pre) * linear
