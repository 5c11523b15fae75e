"""`HookedRootModule`: a torch module of the user's that holds hook points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bridge.hooks.names import UnknownHookError, suggestion
from bridge.legacy.point import Direction, HookFunction, HookPoint
from bridge.legacy.slices import Slice, SliceInput

#: What chooses hook points: nothing (all), a name, several names, or a function of the name.
NamesFilter = Callable[[str], bool] | Sequence[str] | str | None
Hooks = Sequence[tuple[NamesFilter, HookFunction]]
Which = Literal["fwd", "bwd", "both"]
Device = torch.device | str | None
Activations = dict[str, Tensor]


class HookedRootModule(nn.Module):
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
        self.is_caching = False
        self.context_level = 0

    def setup(self) -> None:
        """Names all modules and collects the hook points."""
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.named_modules():
            if name:
                module.name = name  # type: ignore[assignment]
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    self.hook_dict[name] = module

    def hook_points(self) -> Iterable[HookPoint]:
        """All hook points."""
        return self.hook_dict.values()

    def _chosen(self, names: NamesFilter) -> list[HookPoint]:
        if names is None:
            return list(self.hook_dict.values())
        if callable(names):
            return [point for name, point in self.hook_dict.items() if names(name)]
        if not isinstance(names, Sequence):
            raise TypeError(f"names are {type(names).__name__}; they must be a name, a list of names, or a function")
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if name not in self.hook_dict:
                raise UnknownHookError(f"there is no hook point {name!r}.{suggestion(name, self.hook_dict)}")
        return [point for name, point in self.hook_dict.items() if name in wanted]

    def add_hook(
        self, name: NamesFilter, hook: HookFunction, dir: Direction = "fwd", is_permanent: bool = False,
        level: int | None = None, prepend: bool = False,
    ) -> None:  # fmt: skip
        """Adds a function to hook points until it is removed: `HookPoint.add_hook` for each."""
        for point in self._chosen(name):
            assert point.name is not None  # setup gave it one
            self.check_and_add_hook(point, point.name, hook, dir, is_permanent, level, prepend)

    def check_and_add_hook(
        self, hook_point: HookPoint, hook_point_name: str, hook: HookFunction, dir: Direction = "fwd",
        is_permanent: bool = False, level: int | None = None, prepend: bool = False,
    ) -> None:  # fmt: skip
        """Adds a function to one hook point, unless `check_hooks_to_add` objects."""
        self.check_hooks_to_add(hook_point, hook_point_name, hook, dir=dir, is_permanent=is_permanent, prepend=prepend)
        hook_point.add_hook(hook, dir, is_permanent, level, prepend)

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, hook: HookFunction, dir: Direction = "fwd",
        is_permanent: bool = False, prepend: bool = False,
    ) -> None:  # fmt: skip
        """Is called before a hook is added, and does nothing: a subclass raises an error where it wants none."""

    def add_perma_hook(self, name: NamesFilter, hook: HookFunction, dir: Direction = "fwd") -> None:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self, direction: Which = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Removes hooks from all hook points."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empties the `ctx` of all hook points."""
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self, clear_contexts: bool = True, direction: Which = "both", including_permanent: bool = False,
        level: int | None = None,
    ) -> None:  # fmt: skip
        """Removes hooks, and empties contexts."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)
        self.is_caching = False

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

    def get_caching_hooks(
        self, names_filter: NamesFilter = None, incl_bwd: bool = False, device: Device = None,
        remove_batch_dim: bool = False, cache: Activations | None = None, pos_slice: Slice | SliceInput = None,
    ) -> tuple[Activations, list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:  # fmt: skip
        """Hooks that fill a dictionary: it, the forward hooks, and the backward hooks (names + ``_grad``)."""
        found: Activations = {} if cache is None else cache
        chosen, positions = self._chosen(names_filter), Slice.unwrap(pos_slice)
        self.is_caching = True

        def saver(suffix: str) -> HookFunction:
            def save(tensor: Tensor, hook: HookPoint) -> None:
                assert hook.name is not None
                kept = tensor.detach().to(device)
                kept = kept[0] if remove_batch_dim else kept
                in_heads = hook.name.endswith(("hook_q", "hook_k", "hook_v", "hook_z", "hook_result"))
                axis = -3 if in_heads else -2
                found[hook.name + suffix] = positions.apply(kept, axis) if kept.ndim >= -axis else kept

            return save

        forward, backward = saver(""), saver("_grad")
        names = [point.name for point in chosen if point.name is not None]
        return found, [(n, forward) for n in names], [(n, backward) for n in names] if incl_bwd else []

    def add_caching_hooks(
        self, names_filter: NamesFilter = None, incl_bwd: bool = False, device: Device = None,
        remove_batch_dim: bool = False, cache: Activations | None = None,
    ) -> Activations:  # fmt: skip
        """Adds hooks that fill a dictionary in every run until `reset_hooks`; see `get_caching_hooks`."""
        found, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, hook in forward:
            self.add_hook(name, hook)
        for name, hook in backward:
            self.add_hook(name, hook, "bwd")
        return found

    def cache_all(
        self, cache: Activations | None, incl_bwd: bool = False, device: Device = None, remove_batch_dim: bool = False
    ) -> None:
        """The old name of `add_caching_hooks` without a filter."""
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self, cache: Activations | None, names: Callable[[str], bool], incl_bwd: bool = False, device: Device = None,
        remove_batch_dim: bool = False,
    ) -> None:  # fmt: skip
        """The old name of `add_caching_hooks` with a filter."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    def run_with_cache(
        self, *args: Any, names_filter: NamesFilter = None, device: Device = None, remove_batch_dim: bool = False,
        incl_bwd: bool = False, reset_hooks_end: bool = True, clear_contexts: bool = False,
        pos_slice: Slice | SliceInput = None, **kwargs: Any,
    ) -> tuple[Any, Activations]:  # fmt: skip
        """Runs the module and keeps activations. With `incl_bwd` the output is a number, and is run backward."""
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, cache
