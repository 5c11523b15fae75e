"""What a projection does head by head, from its weights where it is a plain linear layer, by asking it where not."""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers.pytorch_utils import Conv1D

from adapters.offloaded import materialized
from adapters.views import Call, View

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
#: Subclasses of torch's layer that compute the same function, in another order of rounding.
_SAME = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's linear layer, or computes the same function of a weight and a bias of these names."""
    kind = type(module)
    return kind is nn.Linear or f"{kind.__module__}.{kind.__qualname__}" in _SAME


def weight_in_out(module: nn.Module) -> Tensor | None:
    """The weight of a plain linear layer as ``[d_in, d_out]``, a view; None for anything else (LoRA, quantised)."""
    if not is_linear(module) and type(module) is not Conv1D:
        return None
    weight: Tensor = materialized(module, "weight")
    if type(weight) not in _PLAIN:
        return None  # a subclass may compute anything: torchao's quantised weights, weights spread over devices
    return weight if type(module) is Conv1D else weight.T


def bias_of(module: nn.Module, like: Tensor) -> Tensor:
    """What the projection gives for an input of zeros: its bias.

    Args:
        module: the projection.
        like: a tensor ``[..., d_in]`` of the right width, type and device.
    """
    weight = weight_in_out(module)
    if weight is not None:
        bias: Tensor | None = materialized(module, "bias")
        return weight.new_zeros(weight.shape[1]) if bias is None else bias
    return module.forward(torch.zeros_like(like[:1, :1]))


def adapted_bias(module: nn.Module, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """The bias of a projection that PEFT may have put adapters around, which may add biases of their own, or scale it.

    Args:
        module: the projection.
        bias: that of what is inside of the adapters; None: it has none.
        like: a tensor of the right type and device.

    Returns:
        `bias` itself where the adapters leave it as it is.
    """
    if not hasattr(module, "base_layer"):
        return bias
    given: Tensor = module.forward(like.new_zeros(1, cast(int, module.in_features)))[0]
    unchanged = not bool(given.any()) if bias is None else torch.equal(given, bias)
    return bias if unchanged else given


def head_results(module: nn.Module, z: Tensor) -> Tensor:
    """Each head's contribution to the output projection, without the bias.

    Args:
        module: the output projection, ``(head d_head) -> d_model``.
        z: ``[batch, pos, head, d_head]``.

    Returns:
        ``[batch, pos, head, d_model]``.
    """
    n_heads, d_head = z.shape[-2:]
    weight = weight_in_out(module)
    if weight is not None:
        return torch.einsum("bphd,hdm->bphm", z, weight.unflatten(0, (n_heads, d_head)))
    own = torch.eye(n_heads, dtype=z.dtype, device=z.device)
    spread = torch.einsum("bphd,hg->bphgd", z, own).flatten(-2)
    return module.forward(spread) - module.forward(torch.zeros_like(spread))


def project_per_head(module: nn.Module, part: View, x: Tensor, call: Call) -> Tensor:
    """Head h's query (or key, or value) from head h's own input.

    Args:
        module: the input projection.
        part: the view of its output that shows the wanted heads, ``[..., head, d_head]``.
        x: the normalised inputs, ``[batch, pos, head, d_model]``.

    Returns:
        ``[batch, pos, head, d_head]``.
    """
    weight = weight_in_out(module)
    if weight is not None:
        per_head = part.get(weight, call)  # d_model head d_head
        out = torch.einsum("bphm,mhd->bphd", x, per_head)
        bias: Tensor | None = materialized(module, "bias")
        return out if bias is None else out + part.get(bias, call)
    everything = part.get(module.forward(x), call)  # batch pos own head d_head
    return everything.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)
