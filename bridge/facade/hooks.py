"""Adding and removing hooks, and choosing hook points."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from bridge.facade.base import WrappedModel
from bridge.hooks.arguments import check_choice
from bridge.hooks.hook_point import Handle, HookPoint
from bridge.hooks.listener import HookFunction
from bridge.hooks.names import NamesFilter
from bridge.run.positions import PosSlice
from bridge.run.recorder import caching_functions


class AddsHooks:
    """Adding and removing hooks: what a bridge shares with a user's own module that holds hook points."""

    def hook_points(self) -> Collection[HookPoint]:
        """All hook points."""
        raise NotImplementedError

    def select_hooks(self, names: NamesFilter | HookPoint) -> Sequence[HookPoint]:
        """The hook points that a filter chooses."""
        raise NotImplementedError

    def add_hook(
        self,
        name: NamesFilter | HookPoint,
        hook: HookFunction | None = None,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        *,
        hook_fn: HookFunction | None = None,
    ) -> list[Handle]:
        """Adds a function to hook points, for all runs, of any thread, until it is removed.

        Args:
            name: a name, an alias, a list of them, or a function of the name.
            hook: called as ``hook(activation, hook=point)``.
            dir, is_permanent, level, prepend: as for `HookPoint.add_hook`.
            hook_fn: another name of `hook`.

        Returns:
            A handle for each hook point, with `remove()`.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing.
            TypeError: not one function.
        """
        if (hook is None) == (hook_fn is None):
            raise TypeError("add_hook takes one function: as `hook`, or as `hook_fn`")
        function = hook_fn if hook is None else hook
        assert function is not None
        if isinstance(function, str | HookPoint):
            raise TypeError(f"add_hook takes the hook point first, then the function: add_hook({function!r}, function)")
        handles: list[Handle] = []
        try:
            for point in self.select_hooks(name):
                handles.append(point.add_hook(function, dir, is_permanent, level, prepend))
        except (TypeError, ValueError):
            for handle in handles:
                handle.remove()
            raise
        return handles

    def add_perma_hook(self, name: NamesFilter | HookPoint, hook: HookFunction, dir: str = "fwd") -> list[Handle]:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise.

        Args:
            name, hook, dir: as for `add_hook`.
        """
        return self.add_hook(name, hook, dir, is_permanent=True)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the hooks that were added from all hook points. Those of a ``with`` statement go with it.

        Args:
            clear_contexts: empty every hook point's `ctx`.
            direction: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: permanent ones too.
            level: only those that were added at this level.
        """
        check_choice("direction", direction, ("fwd", "bwd", "both"))
        if clear_contexts:
            self.clear_contexts()
        for point in self.hook_points():
            if point.listeners:
                point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empties the `ctx` of all hook points."""
        for point in self.hook_points():
            point.clear_context()

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        """Hooks that fill a dictionary with activations, for `run_with_hooks` or `hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice: as for `run_with_cache`.
            cache: the dictionary to fill; None: a new one.

        Returns:
            The dictionary, the forward hooks and the backward hooks.

        Raises:
            ValueError: positions of hook points in a module of the user's, of which nobody says which axis counts them.
        """
        cache = {} if cache is None else cache
        points = self.select_hooks(names_filter)
        if pos_slice is not None and (unsaid := [point.name for point in points if point.point.axes == "..."]):
            raise ValueError(
                f"pos_slice is {pos_slice!r}, and nothing says which axis of {', '.join(unsaid[:3])} counts positions: "
                "index what is kept"
            )
        forward, backward = caching_functions(cache, device, remove_batch_dim, pos_slice)
        return (
            cache,
            [(point.name, forward) for point in points],
            [(point.name, backward) for point in points] if incl_bwd else [],
        )

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> dict[str, Tensor]:
        """Adds hooks that fill a dictionary with the activations of every run until `reset_hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice: as for `get_caching_hooks`.

        Returns:
            The dictionary.
        """
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice
        )
        for name, fn in forward:
            self.add_hook(name, fn)
        for name, fn in backward:
            self.add_hook(name, fn, "bwd")
        return cache


class HookMethods(WrappedModel, AddsHooks):
    """The methods of a bridge that choose hook points, and add hooks for all runs."""

    def hook_points(self) -> Collection[HookPoint]:
        """All hook points, in the order of the computation."""
        return self.hook_dict.values()

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """The hook points that a filter chooses, in the order of the computation.

        Args:
            names: a name, an alias, a list of them, a hook point; a function, which is asked about every name and
                every alias that there is, and chooses a point when it accepts any of its names; None: all but the
                heavy ones that are not switched on by the ``set_use_*`` methods, and the extra ones.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point of another bridge.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> [hook.name for hook in bridge.select_hooks(lambda name: name.endswith("ln1.hook_scale"))][:2]
            ['blocks.0.ln1.hook_scale', 'blocks.1.ln1.hook_scale']
        """
        if isinstance(names, HookPoint):
            if self.hook_dict.get(names.name) is not names:
                raise ValueError(f"{names!r} belongs to another bridge")
            return [names]
        return self.names.select(names, lambda flag: bool(getattr(self.cfg, flag)))

    def get_hook_point(self, hook_name: str) -> HookPoint:
        """The hook point of a name or an alias.

        Args:
            hook_name: such as ``blocks.0.attn.hook_q``.

        Raises:
            UnknownHookError: there is none.
        """
        return self.names.find(hook_name)

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether an unfiltered cache holds `attn.hook_result`."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether an unfiltered cache holds `hook_q_input`, `hook_k_input` and `hook_v_input`."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether an unfiltered cache holds `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether an unfiltered cache holds `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in
