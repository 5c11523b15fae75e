"""What a projection does head by head, from its weights where it is a plain linear layer, by asking it where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from adapters.views import Call, View


class Turned(torch.autograd.Function):
    """What a function makes of a tensor, whose gradient another makes: ``Turned.apply(x, there, back)``.

    A graph keeps nothing of it but what the two functions hold.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor | None]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.back(gradients[0]), None, None


# ----------------------------------------------------------------------------------------------------------------------
# Parameters that are elsewhere until they are needed (`accelerate`, `DTensor`), and where a model's input goes.
# ----------------------------------------------------------------------------------------------------------------------


def materialized(module: nn.Module, name: str) -> Any:
    """A module's parameter, or what else it has under the name; None where it has nothing.

    Where `accelerate` has put the values elsewhere (``device_map``, ``cpu_offload``), they are fetched from there:
    those on the CPU are the model's own, so that an edit of them is an edit of the model; those on disk are read anew.
    One that is spread over processes is put together, a copy: all of them have to ask for it.
    """
    found = getattr(module, name, None)
    if isinstance(found, DTensor):
        return whole(found)
    if isinstance(found, Tensor) and found.is_meta:
        for hook in _hooks(module):
            values = getattr(hook, "weights_map", None)
            if values is not None and name in values:
                value: Tensor = values[name]
                device = hook.execution_device
                return value if device is None else value.to(device)
    return found


def whole(parameter: Tensor) -> Tensor:
    """A parameter, put together where it is spread over processes, all of which have to ask for it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def input_device(model: nn.Module) -> torch.device:
    """Where a model's input goes: where its weights are, or where accelerate brings them when they are needed.

    Raises:
        StopIteration: it has no parameters.
    """
    first = _first_parameter(model)
    if first is None:
        first = next(model.parameters())
    if first.is_meta:
        for module in model.modules():
            for hook in _hooks(module):
                execution = getattr(hook, "execution_device", None)
                if execution is not None:
                    return torch.device(execution)
    return first.device


def has_weights(model: nn.Module) -> bool:
    """Whether a model can be run: its weights are somewhere."""
    return next(model.parameters(), None) is not None and input_device(model).type != "meta"


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """The first of a model's parameters. (`Module.parameters` takes ten times as long, in every run.)"""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on a module: it has one, which may be several in turn."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
#: Subclasses of torch's layer that compute the same function, in another order of rounding.
_SAME = (
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear", "adapters.multihead.InProjection",
)  # fmt: skip


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's linear layer, or computes the same function of a weight and a bias of these names."""
    kind = type(module)
    return kind is nn.Linear or f"{kind.__module__}.{kind.__qualname__}" in _SAME


def weight_in_out(module: nn.Module) -> Tensor | None:
    """The weight of a plain linear layer as ``[d_in, d_out]``, a view; None for anything else (LoRA, quantised)."""
    if type(module) is not Conv1D and not is_linear(module):
        return None
    weight: Tensor = materialized(module, "weight")
    if type(weight) not in _PLAIN:
        return None  # a subclass may compute anything: torchao's quantised weights, weights spread over devices
    return weight if type(module) is Conv1D else weight.T


def _asked(module: nn.Module, x: Tensor, told: Mapping[str, Any]) -> Tensor:
    """What a projection makes of each copy of its rows, told what it was told of each row: PEFT's adapters of rows.

    Args:
        module: the projection.
        x: ``[batch, copy, pos, d_in]``.
        told: what it was called with beside its input, by name.
    """
    rows, copies = x.shape[:2]

    def of_copies(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.repeat_interleave(copies, 0) if value.ndim and len(value) == rows else value
        several = isinstance(value, list | tuple) and len(value) == rows
        return [entry for entry in value for _ in range(copies)] if several else value

    more = {name: of_copies(value) for name, value in told.items()}
    return module.forward(x.flatten(0, 1), **more).unflatten(0, (rows, copies))


def bias_of(module: nn.Module, like: Tensor, told: Mapping[str, Any] | None = None) -> Tensor:
    """What the projection gives for an input of zeros: its bias.

    Args:
        module: the projection.
        like: a tensor ``[batch, pos, d_in]`` of the right width, type and device.
        told: what it is called with beside its input, where rows have adapters of their own.
    """
    weight = weight_in_out(module)
    if weight is not None:
        bias: Tensor | None = materialized(module, "bias")
        return weight.new_zeros(weight.shape[1]) if bias is None else bias
    if told:
        return _asked(module, torch.zeros_like(like)[:, None], told)[:, 0]
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


def head_results(module: nn.Module, z: Tensor, told: Mapping[str, Any] | None = None) -> Tensor:
    """Each head's contribution to the output projection, without the bias.

    Args:
        module: the output projection, ``(head d_head) -> d_model``.
        z: ``[batch, pos, head, d_head]``.
        told: what it is called with beside its input, where rows have adapters of their own.

    Returns:
        ``[batch, pos, head, d_model]``.

    Raises:
        TypeError: of a layer that is not plain, they do not sum to its output.
    """
    n_heads, d_head = z.shape[-2:]
    weight = weight_in_out(module)
    if weight is not None:
        return torch.einsum("bphd,hdm->bphm", z, weight.view(n_heads, d_head, -1))
    own = torch.eye(n_heads, dtype=z.dtype, device=z.device)
    whole, told = z.flatten(2)[:, None], told or {}
    spread = torch.einsum("bphd,hg->bgphd", z, own).flatten(-2)
    bias, *made = _asked(module, torch.cat([torch.zeros_like(whole), whole, spread], 1), told).unbind(1)
    results = torch.stack(made[1:], 2) - bias[:, :, None]
    _check_sum(module, results, made[0] - bias)
    return results


def _check_sum(module: nn.Module, results: Tensor, together: Tensor) -> None:
    """Refuses a layer in which heads do not add up: one that rounds its input as it comes.

    Raises:
        TypeError: it is one.
    """
    results, together = results.detach(), together.detach()
    eps, scale = torch.finfo(results.dtype).eps, float(results.abs().sum(-2).max()) if results.numel() else 0.0
    off = float((results.sum(-2) - together).abs().max()) if results.numel() else 0.0
    if off > (64 if eps < 1e-5 else 4) * eps * scale:
        raise TypeError(
            f"the results of heads cannot be had: what a {type(module).__name__} makes of each head alone does not sum "
            f"to its output (off by {off:.1g}), for it rounds its input as it comes (int8 activations). Load the model "
            "without quantisation, or with that of weights alone"
        )


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
    made = _asked(module, x.transpose(1, 2), call.told).transpose(1, 2)
    everything = part.get(made, call)  # batch pos own head d_head
    return everything.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)
