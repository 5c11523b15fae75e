"""Blocks that a program only runs are compiled once for all of them, by torch's `nested_compile_region`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from adapters.views import Args, Kwargs
from bridge.programs.shells import HOOKS


@torch.compiler.nested_compile_region
def _run(each: LikeOthers, args: Args, kwargs: Kwargs) -> object:
    # Given a block itself, torch would trace the first one alone, and have no guards on what the others are.
    return type(each.block).forward(each.block, *args, **kwargs)


class LikeOthers:
    """The forward of a block in which a program has nothing to do.

    Args:
        block: the block's module object.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The block's own forward; compiled, the code of the first block that is like it."""
        given = (*args, *kwargs.values())
        if torch.compiler.is_dynamo_compiling() and all(_is_plain(value) for value in given):
            return _run(self, args, kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def compile_once(blocks: Iterable[nn.Module]) -> None:
    """Has blocks compiled once for all that are alike. Those with hooks inside are compiled one by one.

    Args:
        blocks: the module objects of a program.
    """
    for block in blocks:
        if "forward" not in block.__dict__ and not any(_is_seen(part) for part in block.modules() if part is not block):
            block.__dict__["forward"] = LikeOthers(block).__call__


def compile_one_by_one(blocks: Iterable[nn.Module]) -> None:
    """Takes that back.

    Args:
        blocks: likewise.
    """
    for block in blocks:
        if isinstance(getattr(block.__dict__.get("forward"), "__self__", None), LikeOthers):
            del block.__dict__["forward"]


def _is_seen(module: nn.Module) -> bool:
    """Whether something stands at a module, or in the place of its forward."""
    return "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in HOOKS)


def _is_plain(value: object) -> bool:
    """Whether an argument may cross into code that is compiled by itself: no cache of keys and values."""
    if isinstance(value, tuple):
        return all(isinstance(each, Tensor) for each in value)
    return value is None or isinstance(value, Tensor | bool)
