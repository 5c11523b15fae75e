"""`HookPoint`: an identity module at which functions can read and change an activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bridge.hooks import hook_point as bridge_point

#: ``fn(activation, hook=point)`` returns the new activation, or None.
HookFunction = Callable[..., Any]
Direction = Literal["fwd", "bwd"]


@dataclass
class LensHandle:
    """One hook at a hook point.

    Attributes:
        hook: torch's handle.
        is_permanent: only removed when permanent hooks are asked for.
        context_level: the `hooks` context that added it.
    """

    hook: RemovableHandle
    is_permanent: bool = False
    context_level: int | None = None


class _OfBridgesToo(type):
    """Hook points of bridges count as instances: functions that say ``hook: HookPoint`` may be given them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            cls is HookPoint and isinstance(instance, bridge_point.HookPoint)
        )


class HookPoint(nn.Module, metaclass=_OfBridgesToo):
    """An identity module at which an activation can be read and changed.

    Attributes:
        name: its name in the root module, set by `HookedRootModule.setup`.
        ctx: a dictionary for hook functions to keep state in.
        fwd_hooks, bwd_hooks: the hooks that are there.

    Example:
        >>> import torch
        >>> from bridge.legacy.hook_points import HookPoint
        >>> point = HookPoint()
        >>> point.add_hook(lambda x, hook: x * 2)
        >>> point(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self) -> None:
        super().__init__()
        self.fwd_hooks: list[LensHandle] = []
        self.bwd_hooks: list[LensHandle] = []
        self.ctx: dict[Any, Any] = {}
        self.name: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The same tensor."""
        return x

    def add_hook(
        self,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a function.

        Args:
            hook: called as ``hook(activation, hook=point)``, or with the gradient; None from it leaves the tensor.
            dir: ``"fwd"`` or ``"bwd"``.
            is_permanent: only removed with ``including_permanent=True``.
            level: the context that it belongs to.
            prepend: run it before those that are there.

        Raises:
            ValueError: an unknown direction.
        """

        def forward_hook(module: nn.Module, inputs: Any, output: Tensor) -> Any:
            return hook(output, hook=self)

        def backward_hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            new = hook(grad_output[0], hook=self)
            return new if new is None or isinstance(new, tuple) else (new,)

        if dir == "fwd":
            handle, mine = self.register_forward_hook(forward_hook, prepend=prepend), self.fwd_hooks
        elif dir == "bwd":
            handle, mine = self.register_full_backward_hook(backward_hook, prepend=prepend), self.bwd_hooks
        else:
            raise ValueError(f'dir is {dir!r}; it must be "fwd" or "bwd"')
        mine.insert(0 if prepend else len(mine), LensHandle(handle, is_permanent, level))

    def add_perma_hook(self, hook: HookFunction, dir: Direction = "fwd") -> None:
        """Adds a hook that stays unless permanent ones are removed too."""
        self.add_hook(hook, dir, is_permanent=True)

    def remove_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks.

        Args:
            dir: which of them.
            including_permanent: all of them, whatever their level.
            level: only those of this context.

        Raises:
            ValueError: an unknown direction.
        """
        if dir not in ("fwd", "bwd", "both"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd", "bwd" or "both"')

        def keep(handles: list[LensHandle]) -> list[LensHandle]:
            kept = []
            for handle in handles:
                here = level is None or handle.context_level == level
                if including_permanent or (here and not handle.is_permanent):
                    handle.hook.remove()
                else:
                    kept.append(handle)
            return kept

        if dir in ("fwd", "both"):
            self.fwd_hooks = keep(self.fwd_hooks)
        if dir in ("bwd", "both"):
            self.bwd_hooks = keep(self.bwd_hooks)

    def clear_context(self) -> None:
        """Empties `ctx`."""
        self.ctx = {}

    def layer(self) -> int:
        """The number in a name such as ``blocks.3.mlp.hook_post``.

        Raises:
            ValueError: the name has none there, or `setup` has not been called.
        """
        part = (self.name or "").split(".")[1:2]
        if not part or not part[0].isdigit():
            raise ValueError(f"the hook point {self.name!r} belongs to no layer")
        return int(part[0])
