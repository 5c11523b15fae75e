"""Finding modules by path, and their arguments by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


@functools.cache
def first_parameter(forward: Callable[..., Any]) -> str:
    """The name of a forward function's first parameter after self."""
    return list(inspect.signature(forward).parameters)[1]


class Finder:
    """Finds a module anew each time, since users replace modules (LoRA, wrappers of their own).

    Args:
        root: the model.
        path: dotted, from the model.
    """

    __slots__ = ("parts", "root")

    def __init__(self, root: nn.Module, path: str) -> None:
        self.root = root
        self.parts = path.split(".") if path else []

    @property
    def module(self) -> nn.Module:
        """The module that stands there now."""
        found: Any = self.root
        for part in self.parts:
            child = found._modules.get(part)
            found = getattr(found, part) if child is None else child
        return found


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs a model that was compiled as it was written, since compiled code does not know hooks that come later."""
    with torch.compiler.set_stance("force_eager") if _any_compiled(model) else nullcontext():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside a ``with`` statement; afterwards every module is in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _any_compiled(model: nn.Module) -> bool:
    """Whether a module or its forward was compiled. (`Module.modules` takes ten times as long, in every run.)"""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            inside = module._modules
            if module._compiled_call_impl is not None or "_orig_mod" in inside:
                return True
            if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
                return True
            left.extend(inside.values())
    return False
