"""A probe copy of a model for proofs: its own modules, with the model's parameters but for those that prove nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adapters.observe.lent import Lender, lending
from adapters.offloaded import has_weights, input_device, materialized, whole

#: The dictionaries in which a module keeps what was attached to it: its probe copy has none of it.
_ATTACHED = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
#: Parameters in float32 that a probe copy may take of its own, in bytes; of a model with more, each is brought for use.
ROOM = 2**31
_HALF = (torch.float16, torch.bfloat16)


def trivial_parameters(model: nn.Module) -> list[str]:
    """The parameters whose elements are all the same (biases of zero, norms of one): they prove nothing.

    Buffers that are biases count, such as what BART adds to its logits.
    """
    held = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name.endswith("bias"))]
    return [name for name, p in held if not p.is_meta and _is_trivial(p)]


def _is_trivial(p: Tensor) -> bool:
    """Whether all elements are the first: of most parameters the second is not."""
    plain = type(p) in (nn.Parameter, Tensor) or isinstance(p, DTensor)
    if not plain or not p.is_floating_point() or p.numel() < 2:
        return False
    p = whole(p).flatten()
    return all(bool((x == x[0]).all()) for x in (p[:2], p))


def why_no_probe_copy(model: nn.Module) -> str:
    """Why a model can have no probe copy; "" where it can."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point():
            return f"{name} is quantised"
    return ""


def is_moved(model: nn.Module) -> bool:
    """Whether accelerate brings parameters for a run: they are offloaded, or on several devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


@contextmanager
def probe_copy(model: nn.Module, *, noise: float = 0.2) -> Iterator[nn.Module]:
    """A model of other modules that shares the parameters: nothing done to it is done to the model.

    Parameters whose elements are all the same get noise, those in half precision are in float32, and those that were
    made in inference mode are copied; these are its own. Where they would take too much room, and where accelerate
    moves parameters, each is brought in float32 when it is used (see `lent`): the copy runs inside the ``with``
    statement alone.
    Hooks of any kind, the user's and the bridge's, stay with the model.

    Args:
        model: the model; see `why_no_probe_copy`.
        noise: the standard deviation of what is added.
    """
    moved = is_moved(model)
    half = sum(p.numel() for p in model.parameters() if p.dtype in _HALF)
    device = input_device(model)
    generator = torch.Generator().manual_seed(0)
    lenders: dict[int, Lender] = {}
    tensors: dict[int, Tensor] = {}
    for module, name, held in _held(model):
        if id(held) in tensors:
            continue
        lender = Lender(partial(materialized, module, name), device if moved else held.device)
        is_parameter = isinstance(held, nn.Parameter)
        new = lender() if moved or held.is_inference() else held.detach()
        trivial = (is_parameter or name.endswith("bias")) and _is_trivial(new)
        if trivial:
            new = new + (torch.randn(new.shape, generator=generator) * noise).to(new)
        elif is_parameter and (moved or (held.dtype in _HALF and 4 * half > ROOM)):
            tensors[id(held)], lenders[id(held)] = held, lender
            continue
        elif not is_parameter:
            new = new.clone()
        if new.dtype in _HALF:
            new = new.float()
        own = is_parameter and new.data_ptr() != held.data_ptr()
        tensors[id(held)] = (
            nn.Parameter(new, requires_grad=held.requires_grad) if own else held if is_parameter else new
        )
    copies: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in model.modules()}
    for module in model.modules():
        copies[id(module)].__dict__ = _state(module, copies, tensors)
    with lending(lenders):
        yield copies[id(model)]


def _held(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """All parameters and buffers, with the modules that have them."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield from ((module, name, x) for name, x in held.items() if x is not None)


def _state(module: nn.Module, copies: Mapping[int, nn.Module], tensors: Mapping[int, Tensor]) -> dict[str, Any]:
    """What a module keeps, with copies for modules and the other tensors for its own."""
    state: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in _ATTACHED:
            state[name] = type(value)()
        elif name in ("_hf_hook", "_old_forward") or (name == "forward" and "_hf_hook" in module.__dict__):
            continue  # accelerate's
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


@contextmanager
def model_or_probe_copy(model: nn.Module) -> Iterator[nn.Module]:
    """What is run: the model; or its probe copy, where its parameters prove nothing, or little, or have no gradients.

    Args:
        model: a Hugging Face model.
    """
    parameters = list(model.parameters())
    inference = any(p.is_inference() for p in parameters)
    half = any(p.dtype in _HALF for p in parameters)
    if (
        not has_weights(model)
        or why_no_probe_copy(model)
        or not (is_moved(model) or half or inference or trivial_parameters(model))
    ):
        yield model
        return
    with probe_copy(model) as copied:
        yield copied
