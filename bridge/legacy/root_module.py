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
        self,
        name: NamesFilter,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a function to hook points until it is removed.

        Args:
            name: a name, a list of them, or a function of the name.
            hook, dir, is_permanent, level, prepend: as for `HookPoint.add_hook`.

        Raises:
            UnknownHookError: a name that no hook point has.
        """
        for point in self._chosen(name):
            assert point.name is not None  # setup gave it one
            self.check_and_add_hook(point, point.name, hook, dir, is_permanent, level, prepend)

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a function to one hook point, unless `check_hooks_to_add` objects."""
        self.check_hooks_to_add(hook_point, hook_point_name, hook, dir=dir, is_permanent=is_permanent, prepend=prepend)
        hook_point.add_hook(hook, dir, is_permanent, level, prepend)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Is called before a hook is added, and does nothing: a subclass raises an error where it wants none."""

    def add_perma_hook(self, name: NamesFilter, hook: HookFunction, dir: Direction = "fwd") -> None:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks from all hook points."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empties the `ctx` of all hook points."""
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks, and empties contexts.

        Args:
            clear_contexts: whether to empty the contexts.
            direction, including_permanent, level: as for `HookPoint.remove_hooks`.
        """
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)
        self.is_caching = False

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[NamesFilter, HookFunction]] = (),
        bwd_hooks: Sequence[tuple[NamesFilter, HookFunction]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedRootModule]:
        """Hooks for the runs inside a ``with`` statement.

        Args:
            fwd_hooks, bwd_hooks: pairs of names and a function.
            reset_hooks_end: remove the hooks of this statement afterwards.
            clear_contexts: empty contexts when they are removed.
        """
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
        self,
        *args: Any,
        fwd_hooks: Sequence[tuple[NamesFilter, HookFunction]] = (),
        bwd_hooks: Sequence[tuple[NamesFilter, HookFunction]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs the module with hooks.

        Args:
            args, kwargs: of the module's `forward`.
            fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts: as for `hooks`. Backward hooks need
                ``reset_hooks_end=False`` when the backward pass comes after this call.
        """
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Slice | SliceInput = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        """Hooks that fill a dictionary.

        Args:
            names_filter: which hook points.
            incl_bwd: gradients too, under name + ``_grad``.
            device: where to keep the tensors; None: where they are.
            remove_batch_dim: keep only the first of the batch, without its axis.
            cache: the dictionary; None: a new one.
            pos_slice: which positions to keep.

        Returns:
            The dictionary, the forward hooks, the backward hooks.
        """
        found: dict[str, Tensor] = {} if cache is None else cache
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
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Adds hooks that fill a dictionary in every run until `reset_hooks`; see `get_caching_hooks`."""
        found, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, hook in forward:
            self.add_hook(name, hook)
        for name, hook in backward:
            self.add_hook(name, hook, "bwd")
        return found

    def cache_all(
        self,
        cache: dict[str, Tensor] | None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """The old name of `add_caching_hooks` without a filter."""
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self,
        cache: dict[str, Tensor] | None,
        names: Callable[[str], bool],
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """The old name of `add_caching_hooks` with a filter."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    def run_with_cache(
        self,
        *args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Slice | SliceInput = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Runs the module and keeps activations.

        Args:
            args, kwargs: of the module's `forward`.
            names_filter, device, remove_batch_dim, incl_bwd, pos_slice: as for `get_caching_hooks`; with `incl_bwd` the
                output is a number, and is run backward.
            reset_hooks_end, clear_contexts: as for `hooks`.

        Returns:
            The output and the activations by name.
        """
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, cache
