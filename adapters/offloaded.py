"""Parameters that are elsewhere until they are needed (`accelerate`, `DTensor`), and where a model's input goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
