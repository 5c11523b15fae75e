"""Module objects of our own around a model's own parameters: what is put before or behind them, the model does not see.

A shell is of the class of the module that it stands for, and shares its parameters, buffers and configuration: the very
dictionaries, so that a parameter that is replaced in the model is replaced here too.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from bridge.taps.tap import Tap
from bridge.wiring.boundary import strip
from bridge.wiring.compiled import ForcedEager

#: The dictionaries of torch hooks, of which a shell has copies.
HOOKS = (
    "_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def shell_of(model: nn.Module) -> nn.Module:
    """A model of shells, with the user's torch hooks and without those of any bridge.

    Args:
        model: the Hugging Face model, as it was written (see `written`).

    Raises:
        ValueError: a module has a forward of its own, which belongs to the module and not to a shell of it.
    """
    shells: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        shell = module.__class__.__new__(module.__class__)
        shell.__dict__.update(module.__dict__)
        _take_over_forward(shell, module, path)
        shells[id(module)] = shell
    for shell in shells.values():
        fields = shell.__dict__
        for name, value in fields.items():
            if name == "_modules":
                fields[name] = {
                    key: None if child is None else shells[id(child)] for key, child in shell._modules.items()
                }
            elif name in HOOKS:
                fields[name] = value.copy()
            else:
                fields[name] = _with_shells(value, shells)
        fields["_compiled_call_impl"] = None
        if "gradient_checkpointing" in fields:  # a block that backward computes again is no part of the program
            fields["gradient_checkpointing"] = False
    shell = shells[id(model)]
    strip(shell)
    return shell


def written(model: nn.Module) -> tuple[nn.Module, str]:
    """A model without what `torch.compile` has put around it, and the path to it."""
    path = ""
    while "_orig_mod" in model._modules:
        model, path = model.get_submodule("_orig_mod"), f"{path}_orig_mod."
    return model, path


def _take_over_forward(shell: nn.Module, module: nn.Module, path: str) -> None:
    """Takes a tap of ours from before a forward. One of the module's own (a kernel's) becomes the shell's.

    Raises:
        ValueError: someone else's stands there.
    """
    forward: Any = shell.__dict__.pop("forward", None)
    while isinstance(forward, Tap | ForcedEager):
        forward = forward.original
    while hasattr(forward, "_torchdynamo_orig_callable"):  # what torch.compile(model.forward) left there
        forward = forward._torchdynamo_orig_callable
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        if forward.__func__ is not type(module).forward:
            shell.__dict__["forward"] = types.MethodType(forward.__func__, shell)
        return
    if forward is not None and getattr(forward, "__func__", None) is not type(shell).forward:
        raise ValueError(
            f"{path or 'the model'} ({type(shell).__name__}) has a forward of its own, {forward!r}: accelerate puts "
            "one there where it moves weights between devices (device_map, cpu_offload). A program calls the class's "
            "forward: load the model on one device, and remove what replaces forwards"
        )


def _with_shells(value: Any, shells: dict[int, nn.Module]) -> Any:
    """What a module keeps in an attribute, with shells in the place of the model's modules."""
    if isinstance(value, nn.Module):
        return shells.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in shells:
        return types.MethodType(value.__func__, shells[id(value.__self__)])
    if type(value) in (list, tuple) and any(id(item) in shells for item in value):
        return type(value)([_with_shells(item, shells) for item in value])
    if type(value) is dict and any(id(item) in shells for item in value.values()):
        return {key: _with_shells(item, shells) for key, item in value.items()}
    return value
