"""How transformers keeps the experts of a mixture: all in two parameters, ``gate_up_proj`` and ``down_proj``.

A family's experts module says of itself how they lie there: with the outputs first or last (``is_transposed``), gate
and up one after the other or in turn (``is_concatenated``), with biases or without (``has_bias``).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.offloaded import held

#: The projections of an expert, by HookedTransformer's names: before the activation function, beside it, after it.
ExpertPart = Literal["W_gate", "W_in", "W_out"]


def _held(experts: nn.Module, name: str) -> Tensor:
    """What a module holds for all its experts.

    Raises:
        TypeError: it holds no such tensor.
    """
    found = held(experts, name)
    if not isinstance(found, Tensor):
        raise TypeError(f"{type(experts).__name__} does not keep its experts as transformers does: it has no {name}")
    return found


def gate_and_up(experts: nn.Module, x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The two halves of what ``gate_up_proj`` is or makes, as views.

    Args:
        experts: the module that holds the experts.
        x: a tensor with both along an axis.
        dim: that axis.
    """
    if experts.is_concatenated:
        gate, up = x.chunk(2, dim=dim)
        return gate, up
    x = x.movedim(dim, -1)
    return x[..., ::2].movedim(-1, dim), x[..., 1::2].movedim(-1, dim)


def joined(experts: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """The reverse of `gate_and_up`, along the last axis."""
    if experts.is_concatenated:
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def width(experts: nn.Module) -> int:
    """How many neurons an expert has."""
    return _held(experts, "down_proj").shape[1 if experts.is_transposed else 2]


def expert_weight(experts: nn.Module, index: int, part: ExpertPart) -> Float[Tensor, "d_out d_in"]:
    """One projection of one expert, ``[d_out, d_in]`` as in a linear layer: a view."""
    if part == "W_out":
        weight = _held(experts, "down_proj")[index]
        return weight.mT if experts.is_transposed else weight
    both = _held(experts, "gate_up_proj")[index]
    return gate_and_up(experts, both.mT if experts.is_transposed else both, dim=0)[part == "W_in"]


def expert_bias(experts: nn.Module, index: int, part: ExpertPart) -> Float[Tensor, " d_out"]:
    """The bias of one projection of one expert, ``[d_out]``: a view."""
    if part == "W_out":
        return _held(experts, "down_proj_bias")[index]
    return gate_and_up(experts, _held(experts, "gate_up_proj_bias")[index])[part == "W_in"]
