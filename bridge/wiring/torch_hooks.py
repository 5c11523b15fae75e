"""Torch hooks without handles: to make one and to remove with it takes longer than most of our hooks do.

They stand in torch's own dictionaries, under the identity of their owner. No two owners have one while they live, and
the numbers that torch gives out are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn


class OwnedHook(NamedTuple):
    """A hook, for those who add and remove hundreds in each run.

    Attributes:
        owner: the identity of who adds it.
        hook: the hook.
        before: it is a forward pre-hook, which is given keyword arguments too.
    """

    owner: int
    hook: Callable[..., Any]
    before: bool


def add_all(modules: Iterable[nn.Module], hooks: Iterable[OwnedHook]) -> None:
    """Adds a hook to each of several modules.

    Args:
        modules: the modules.
        hooks: for each module, its hook.
    """
    for module, (owner, hook, before) in zip(modules, hooks, strict=True):
        if before:
            module._forward_pre_hooks_with_kwargs[owner] = True
            module._forward_pre_hooks[owner] = hook
        else:
            module._forward_hooks[owner] = hook


def remove_all(modules: Iterable[nn.Module], hooks: Iterable[OwnedHook]) -> None:
    """Removes what `add_all` added, where it is there.

    Args:
        modules, hooks: as for `add_all`.
    """
    for module, (owner, _, before) in zip(modules, hooks, strict=True):
        if before:
            module._forward_pre_hooks.pop(owner, None)
            module._forward_pre_hooks_with_kwargs.pop(owner, None)
        else:
            module._forward_hooks.pop(owner, None)


def add_pre_hook(module: nn.Module, owner: object, hook: Callable[..., Any]) -> None:
    """Adds a forward pre-hook that is given keyword arguments too.

    Args:
        module: the module.
        owner: who adds it: each adds one of a kind to a module.
        hook: the hook.
    """
    module._forward_pre_hooks_with_kwargs[id(owner)] = True
    module._forward_pre_hooks[id(owner)] = hook


def add_forward_hook(module: nn.Module, owner: object, hook: Callable[..., Any]) -> None:
    """Adds a forward hook.

    Args:
        module, owner, hook: as for `add_pre_hook`.
    """
    module._forward_hooks[id(owner)] = hook


def remove_pre_hook(module: nn.Module, owner: object) -> None:
    """Removes the forward pre-hook that an owner added, if it is there.

    Args:
        module, owner: as for `add_pre_hook`.
    """
    module._forward_pre_hooks.pop(id(owner), None)
    module._forward_pre_hooks_with_kwargs.pop(id(owner), None)


def remove_forward_hook(module: nn.Module, owner: object) -> None:
    """Removes the forward hook that an owner added, if it is there.

    Args:
        module, owner: as for `add_pre_hook`.
    """
    module._forward_hooks.pop(id(owner), None)
