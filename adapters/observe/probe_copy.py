"""A probe copy of a model for proofs: its own modules, with the model's parameters but for those that prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adapters.offloaded import whole

#: The dictionaries in which a module keeps what was attached to it: its probe copy has none of it.
_ATTACHED = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
#: Parameters in float32 that a probe copy may take of its own, in bytes.
ROOM = 2**31


def trivial_parameters(model: nn.Module) -> list[str]:
    """The parameters whose elements are all the same (biases of zero, norms of one): they prove nothing.

    Buffers that are biases count, such as what BART adds to its logits.
    """
    held = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name.endswith("bias"))]
    plain = [(name, p) for name, p in held if type(p) in (nn.Parameter, Tensor) or isinstance(p, DTensor)]
    return [name for name, p in plain if p.is_floating_point() and p.numel() > 1 and not p.is_meta and _is_constant(p)]


def _is_constant(p: Tensor) -> bool:
    """Whether all elements are the first: of most parameters the second is not."""
    p = whole(p).flatten()
    return all(bool((x == x[0]).all()) for x in (p[:2], p))


def why_no_probe_copy(model: nn.Module) -> str:
    """Why a model can have no probe copy; "" where it can."""
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            return f"accelerate moves the parameters of {path or 'the model'}"
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point():
            return f"{name} is quantised"
    return ""


def probe_copy(model: nn.Module, *, noise: float = 0.2) -> nn.Module:
    """A model of other modules that shares the parameters: nothing done to it is done to the model.

    Parameters whose elements are all the same get noise, those in half precision are in float32, and those that were
    made in inference mode are copied; these are its own.
    Hooks of any kind, the user's and the bridge's, stay with the model.

    Args:
        model: the model; see `why_no_probe_copy`.
        noise: the standard deviation of what is added.
    """
    trivial = set(trivial_parameters(model))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        new = parameter.detach()
        if name in trivial:
            new = new + (torch.randn(new.shape, generator=generator) * noise).to(new)
        if new.dtype in (torch.float16, torch.bfloat16):
            new = new.float()
        if new.is_inference():
            new = new.clone()
        own = new.data_ptr() != parameter.data_ptr()
        tensors[id(parameter)] = nn.Parameter(new, requires_grad=parameter.requires_grad) if own else parameter
    for name, buffer in model.named_buffers():
        half = buffer.dtype in (torch.float16, torch.bfloat16)
        tensors[id(buffer)] = buffer.float() if half else buffer.clone()
        if name in trivial:
            tensors[id(buffer)] += (torch.randn(buffer.shape, generator=generator) * noise).to(buffer.device)
    copies: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in model.modules()}
    for module in model.modules():
        copies[id(module)].__dict__ = _state(module, copies, tensors)
    return copies[id(model)]


def _state(module: nn.Module, copies: Mapping[int, nn.Module], tensors: Mapping[int, Tensor]) -> dict[str, Any]:
    """What a module keeps, with copies for modules and the other tensors for its own."""
    state: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in _ATTACHED:
            state[name] = type(value)()
        elif name == "forward" and type(value).__module__.split(".")[0] == "bridge":
            continue  # a tap
        elif name in ("_parameters", "_buffers"):
            state[name] = {key: tensors.get(id(held), held) for key, held in value.items()}
        else:
            state[name] = _other(value, copies)
    return state


def _other(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """A value with copies for the modules in it."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if type(value) is dict:
        return {key: _other(held, copies) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_other(held, copies) for held in value)
    owner = getattr(value, "__self__", None)
    if isinstance(owner, nn.Module) and id(owner) in copies and hasattr(value, "__func__"):
        return value.__func__.__get__(copies[id(owner)])
    return value


def model_or_probe_copy(model: nn.Module) -> nn.Module:
    """What is run: the model; or its probe copy, where its parameters prove nothing, or little, or have no gradients.

    Args:
        model: a Hugging Face model.
    """
    parameters = list(model.parameters())
    half = [p for p in parameters if p.dtype in (torch.float16, torch.bfloat16)]
    inference = any(p.is_inference() for p in parameters)
    if (
        any(p.is_meta for p in parameters)
        or not (half or inference or trivial_parameters(model))
        or why_no_probe_copy(model)
    ):
        return model
    return model if 4 * sum(p.numel() for p in half) > ROOM else probe_copy(model)
