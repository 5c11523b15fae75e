"""Projections head by head: from the weights of a plain linear layer, else by calling the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from adapters.views import Call, View
from adapters.views.values import is_readable


class ReplacesForward:
    """A callable that replaces a module's forward, so that the library can watch the module or
    replace part of its computation. The layer's weight keeps the meaning that its class gives it.

    Attributes:
        original: the forward that it replaced.
    """

    original: Callable[..., Any]


class OpaqueLayerError(TypeError):
    """An error for a weight, a bias or a head's result that a layer does not have: it is quantised,
    wrapped by adapters, or its forward is replaced.
    """


class Turned(torch.autograd.Function):
    """A function whose gradient is given by another function: ``Turned.apply(x, turn, back)``.
    Autograd's graph keeps only the two functions and what they reference.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        turn: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor | None],
    ) -> Tensor:
        ctx.back = back
        return turn(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.back(gradients[0]), None, None


# --------------------------------------------------------------------------------------------------
# Parameters that are elsewhere until they are needed (`accelerate`, `DTensor`), and the device of a
# model's input.
# --------------------------------------------------------------------------------------------------


def materialized(module: nn.Module, name: str) -> Any:
    """Return a module's parameter, or other attribute, of that name; None if it has none.

    Values that `accelerate` has offloaded (``device_map``, ``cpu_offload``) are fetched: values on
    the CPU are the model's own, so editing them edits the model; values on disk are read again. A
    parameter that is sharded over processes is gathered into a copy: all processes have to call
    this.
    """
    parameter = getattr(module, name, None)
    if isinstance(parameter, DTensor):
        return whole(parameter)
    if isinstance(parameter, Tensor) and parameter.is_meta:
        for hook in _hooks(module):
            values = getattr(hook, "weights_map", None)
            if values is not None and name in values:
                device = hook.execution_device
                return values[name] if device is None else values[name].to(device)
    return parameter


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter, gathered if it is sharded over processes; all of them have to call
    this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's input: the device of its weights, or the one to which
    accelerate moves them.

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
    """Tell whether a model can be run: its weights exist somewhere."""
    return next(model.parameters(), None) is not None and input_device(model).type != "meta"


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first of a model's parameters. (`Module.parameters` takes ten times as long, in
    every run.)
    """
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (parameter := _first_parameter(child)) is not None:
            return parameter
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks on a module, which holds one hook or a sequence of them."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
#: Subclasses of torch's layer that compute the same function, with another rounding order.
_SAME = (
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
    "adapters.multihead.InProjection",
)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether a module is torch's linear layer, or computes the same function of its `weight`
    and `bias`.
    """
    kind = type(module)
    is_known = kind is nn.Linear or f"{kind.__module__}.{kind.__qualname__}" in _SAME
    return is_known and runs_its_class(module)


def runs_its_class(module: nn.Module) -> bool:
    """Tell whether a module runs its class's forward. compressed-tensors, for example, replaces it
    on the instance. (Accelerate's replacement calls the class's forward.)
    """
    forward = module.__dict__.get("forward")
    while isinstance(forward, ReplacesForward):
        forward = forward.original
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return True
    forward = getattr(forward, "func", forward)
    if getattr(forward, "__module__", "").startswith("transformers."):
        return True  # of a module whose parts several processes have
    original = module.__dict__.get("_old_forward")
    return getattr(original, "__func__", None) is type(module).forward


def weight_in_out(module: nn.Module) -> Tensor | None:
    """Return the weight of a plain linear layer as ``[d_in, d_out]``, a view; None for anything
    else (LoRA, quantised).
    """
    is_conv = type(module) is Conv1D and runs_its_class(module)
    if not is_conv and not is_linear(module):
        return None
    weight: Tensor = materialized(module, "weight")
    if type(weight) not in _PLAIN:
        # A subclass may compute anything: torchao's quantised weights, weights spread over devices.
        return None
    return weight if type(module) is Conv1D else weight.T


def _projected(module: nn.Module, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Compute a projection for each copy of its rows, with the keyword arguments of its call
    (PEFT's per-row adapters).

    Args:
        module: the projection.
        x: ``[batch, copy, pos, d_in]``.
        arguments: the keyword arguments of its call besides its input.
    """
    rows, copies = x.shape[:2]

    def of_copies(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == rows:
            return value.repeat_interleave(copies, 0)
        if isinstance(value, list | tuple) and len(value) == rows:
            return [entry for entry in value for _ in range(copies)]
        return value

    more = {name: of_copies(value) for name, value in arguments.items()}
    return module.forward(x.flatten(0, 1).contiguous(), **more).unflatten(0, (rows, copies))


def bias_of(module: nn.Module, like: Tensor, arguments: Mapping[str, Any] | None = None) -> Tensor:
    """Return the output of a projection for an input of zeros: its bias.

    Args:
        module: the projection.
        like: a tensor ``[batch, pos, d_in]`` of the right width, type and device.
        arguments: the keyword arguments of its call besides its input, for adapters that differ
            between rows.
    """
    weight = weight_in_out(module)
    if weight is not None:
        bias = materialized(module, "bias")
        return weight.new_zeros(weight.shape[1]) if bias is None else bias
    if arguments:
        return _projected(module, torch.zeros_like(like)[:, None], arguments)[:, 0]
    output: Tensor = module.forward(torch.zeros_like(like[:1, :1]))
    if is_readable(output) and not output.isfinite().all():
        raise OpaqueLayerError(
            f"the bias of a {type(module).__name__} is not available: it gives no number for an"
            " input of zeros, for it scales its input as it comes"
        )
    return output


def adapted_bias(module: nn.Module, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the bias of a projection that may compute it: inside PEFT's adapters, which may add
    biases of their own, or scale it; of a class of its own; with a replaced forward.

    Args:
        module: the projection.
        bias: its parameter; None: it has none.
        like: a tensor of the right type and device.

    Returns:
        `bias` itself where the layer adds it unchanged.

    Raises:
        TypeError: its output for an input of zeros cannot be computed.
    """
    width = getattr(module, "in_features", getattr(module, "nx", None))
    if weight_in_out(module) is not None:
        return bias
    if width is None:
        raise TypeError(
            f"the bias of a {type(module).__name__} is not available: it does not say how wide its"
            " input is"
        )
    output: Tensor = module.forward(like.new_zeros(1, cast(int, width)))[0]
    if not is_readable(output) or not output.isfinite().all():
        return bias  # it scales its input as it comes
    if bias is None:
        return output if output.any() else None
    return bias if torch.equal(output, bias) else output


def head_results(
    module: nn.Module, z: Tensor, arguments: Mapping[str, Any] | None = None
) -> Tensor:
    """Compute each head's contribution to the output projection, without the bias.

    Args:
        module: the output projection, ``(head d_head) -> d_model``.
        z: ``[batch, pos, head, d_head]``.
        arguments: the keyword arguments of its call besides its input, for adapters that differ
            between rows.

    Returns:
        ``[batch, pos, head, d_model]``.

    Raises:
        OpaqueLayerError: the layer is not plain linear, so the contributions do not sum to its
            output.
    """
    n_heads, d_head = z.shape[-2:]
    weight = weight_in_out(module)
    if weight is not None:
        return torch.einsum("bphd,hdm->bphm", z, weight.view(n_heads, d_head, -1))
    own = torch.eye(n_heads, dtype=z.dtype, device=z.device)
    single_heads = torch.einsum("bphd,hg->bgphd", z, own).flatten(-2)
    all_heads = z.flatten(2)[:, None]
    inputs = torch.cat([torch.zeros_like(all_heads), all_heads, single_heads], 1)
    bias, together, *outputs = _projected(module, inputs, arguments or {}).unbind(1)
    results = torch.stack(outputs, 2) - bias[:, :, None]
    if hasattr(module, "base_layer"):  # a router of PEFT's may look at the whole call
        together = module.forward(z.flatten(2), **(arguments or {}))
    _check_sum(module, "heads", results.sum(2) + bias, together, results)
    return results


def check_additive(module: nn.Module, x: Tensor) -> None:
    """Check that the outputs of single neurons sum to a layer's output, on two halves of them.

    Args:
        module: the layer.
        x: its input, ``[..., neuron]``.

    Raises:
        TypeError: they do not.
    """
    odd = torch.arange(x.shape[-1], device=x.device) % 2
    rows = x.detach().reshape(1, -1, x.shape[-1])
    with torch.no_grad():
        bias, together, *halves = [
            module.forward(part) for part in (rows * 0, rows, rows * odd, rows * (1 - odd))
        ]
        results = torch.stack([half - bias for half in halves], -2)
        _check_sum(module, "neurons", results.sum(-2) + bias, together, results)


def _check_sum(
    module: nn.Module, parts: str, total: Tensor, together: Tensor, results: Tensor
) -> None:
    """Raise an error for a layer whose heads or neurons do not add up, such as one that quantises
    its input at run time.

    Raises:
        OpaqueLayerError: they do not add up.
    """
    if not results.numel():
        return
    results, together = results.detach(), together.detach()
    eps = torch.finfo(results.dtype).eps
    tolerance = (64 if eps < 1e-5 else 4) * eps * float(results.abs().sum(-2).nan_to_num().max())
    difference = (total.detach() - together).abs()[together.isfinite()]
    off = float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0
    if off > tolerance:
        raise OpaqueLayerError(
            f"the results of {parts} are not available: what a {type(module).__name__} computes for"
            f" each of the {parts} alone does not sum to its output (off by {off:.1g}), for it is"
            " not linear in its input, or rounds it as it comes (int8 activations). Load the model"
            " without quantisation, or quantise only its weights"
        )


def project_per_head(module: nn.Module, part: View, x: Tensor, call: Call) -> Tensor:
    """Compute head h's query (or key, or value) from head h's own input.

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
        bias = materialized(module, "bias")
        return out if bias is None else out + part.get(bias, call)
    outputs = _projected(module, x.transpose(1, 2), call.told).transpose(1, 2)
    everything = part.get(outputs, call)  # batch pos own head d_head
    return everything.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)
