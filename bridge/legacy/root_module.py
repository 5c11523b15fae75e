"""`HookedRootModule`: a torch module of the user's that holds hook points."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bridge.facade.hooks import AddsHooks
from bridge.hooks.hook_point import HookPoint as AnyHookPoint
from bridge.hooks.names import Names, NamesFilter
from bridge.legacy.point import HookFunction, HookPoint, point_named

Hooks = Sequence[tuple[NamesFilter, HookFunction]]
Device = torch.device | str | None
Activations = dict[str, Tensor]


class HookedRootModule(nn.Module, AddsHooks):
    """A torch module of the user's that holds hook points. Its `__init__` ends with ``self.setup()``.

    Attributes:
        mod_dict: all modules by name.
        hook_dict: all hook points by name.

    Example:
        >>> import torch
        >>> from bridge.legacy.hook_points import HookedRootModule, HookPoint
        >>> class Square(HookedRootModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.hook_square = HookPoint()
        ...         self.setup()
        ...     def forward(self, x):
        ...         return self.hook_square(x * x) + 1
        >>> output, cache = Square().run_with_cache(torch.tensor([3.0]))
        >>> output, cache["hook_square"]
        (tensor([10.]), tensor([9.]))
    """

    mod_dict: dict[str, nn.Module]
    hook_dict: dict[str, HookPoint]

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.context_level = 0

    def setup(self) -> None:
        """Names all modules and collects the hook points."""
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.named_modules():
            if name:
                module.name = name  # type: ignore[assignment]
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    module.order, module.point = len(self.hook_dict), point_named(name)
                    self.hook_dict[name] = module

    def hook_points(self) -> Collection[AnyHookPoint]:
        """All hook points."""
        return self.hook_dict.values()

    def select_hooks(self, names: NamesFilter | AnyHookPoint) -> Sequence[AnyHookPoint]:
        """The hook points that a filter chooses.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point of another module.
        """
        if isinstance(names, AnyHookPoint):
            if not any(names is each for each in self.hook_dict.values()):
                raise ValueError(f"{names!r} belongs to another module")
            return [names]
        return Names({**self.hook_dict}).select(names, bool)

    def remove_all_hook_fns(self, *args: Any, **kwargs: Any) -> None:
        """`reset_hooks` that leaves contexts as they are."""
        self.reset_hooks(False, *args, **kwargs)

    @contextmanager
    def hooks(
        self, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), reset_hooks_end: bool = True, clear_contexts: bool = False
    ) -> Iterator[HookedRootModule]:
        """Hooks for the runs inside a ``with`` statement."""
        self.context_level += 1
        try:
            for specs, direction in ((fwd_hooks, "fwd"), (bwd_hooks, "bwd")):
                for names, hook in specs:
                    self.add_hook(names, hook, direction, level=self.context_level)  # type: ignore[arg-type]
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, level=self.context_level)
            self.context_level -= 1

    def run_with_hooks(
        self, *args: Any, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), reset_hooks_end: bool = True,
        clear_contexts: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Runs the module with hooks. Backward hooks need ``reset_hooks_end=False`` where the backward pass comes after
        this call."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def cache_all(self, cache: Activations | None, *args: Any, **kwargs: Any) -> None:
        """The old name of `add_caching_hooks` without a filter."""
        self.cache_some(cache, None, *args, **kwargs)

    def cache_some(
        self, cache: Activations | None, names: NamesFilter, incl_bwd: bool = False, device: Device = None,
        remove_batch_dim: bool = False,
    ) -> None:  # fmt: skip
        """The old name of `add_caching_hooks` with a filter."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    def run_with_cache(
        self, *args: Any, names_filter: NamesFilter = None, device: Device = None, remove_batch_dim: bool = False,
        incl_bwd: bool = False, reset_hooks_end: bool = True, clear_contexts: bool = False, **kwargs: Any,
    ) -> tuple[Any, Activations]:  # fmt: skip
        """Runs the module and keeps activations. With `incl_bwd` the output is a number, and is run backward."""
        cache, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim)
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, cache
