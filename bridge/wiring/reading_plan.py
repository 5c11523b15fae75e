"""How a run reads many activations at little cost: where it stands is worked out once, and read by one function each.

A cache of everything is at hundreds of places. To attach a listener to each hook point, and to ask each time who
sees what, costs as much as a small model's forward pass. Where nobody changes anything, none of that is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from adapters.paths import call_number, missing_module_message
from adapters.views import Args, Kwargs
from bridge.hooks.context import CURRENT
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Scope
from bridge.hooks.modules import argument, element_of
from bridge.wiring.site import SiteHook
from bridge.wiring.torch_hooks import add_forward_hook, add_pre_hook, remove_hooks_of

#: What is called with what passed a place: its hook points, the tensor, and the call: module, args, kwargs.
Keep = Callable[[tuple[HookPoint, ...], Tensor, nn.Module, Args, Kwargs], None]


class _Place:
    """One site that is read: its module, and the hook points that stand there."""

    __slots__ = ("before", "call", "key", "module", "points", "site")

    def __init__(self, site: SiteHook, module: nn.Module, points: tuple[HookPoint, ...]) -> None:
        self.site, self.module, self.points = site, weakref.ref(module), points
        self.key = site.site.key
        self.call = call_number(site.site.path)
        self.before = site.site.kind == "input"


class ReadingHook:
    """The torch hook at one place, for one run."""

    __slots__ = ("_keep", "_place", "_scope")

    def __init__(self, place: _Place | None, keep: Keep | None, scope: Scope | None) -> None:
        self._place, self._keep, self._scope = place, keep, scope

    # A copy of the model that is made meanwhile carries inert ones.
    def __reduce__(self) -> tuple[object, ...]:
        return ReadingHook, (None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadingHook:
        return ReadingHook(None, None, None)

    def _is_meant(self, module: nn.Module, number: int | None) -> bool:
        context = CURRENT.get()
        if self._scope not in context.visible:
            return False
        return number is None or (context.run is not None and context.run.is_call(module, number))

    def on_output(self, module: nn.Module, args: Args, output: Any) -> None:
        """The forward hook."""
        if self._place is not None and self._keep is not None and self._is_meant(module, self._place.call):
            x = output if isinstance(output, Tensor) else element_of(output, int(self._place.key or 0))
            self._keep(self._place.points, x, module, args, {})

    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> None:
        """The forward pre-hook."""
        if self._place is not None and self._keep is not None and self._is_meant(module, self._place.call):
            key = self._place.key
            x = (
                args[0]
                if args and key is None and isinstance(args[0], Tensor)
                else argument(module, args, kwargs or {}, key)[0]
            )
            self._keep(self._place.points, x, module, args, kwargs or {})


class ReadingPlan:
    """Where a run stands that reads certain hook points.

    Args:
        points: the hook points.
        sites: for each hook point, the torch hook of its site; None where a tap serves it.

    Attributes:
        points: the hook points.
        others: those that are read as by any listener: inside of a forward, with the help of another site, where a
            module of the user's calls them, or where each process has a part.
    """

    def __init__(self, points: Sequence[HookPoint], sites: Mapping[HookPoint, SiteHook | None]) -> None:
        self.points = list(points)
        self.others: list[HookPoint] = []
        at: dict[SiteHook, list[HookPoint]] = {}
        for point in points:
            site = sites[point]
            if site is None or point.sources or site.module is None or not site.reads_plainly:
                self.others.append(point)
            else:
                at.setdefault(site, []).append(point)
        #: Where each module was found: in which module, under which name. A plan keeps none of them alive.
        self._found: dict[tuple[int, str], tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]]] = {}
        self._lasting = True
        self._places = [_Place(site, self._find(site), tuple(at[site])) for site in at]

    def _find(self, site: SiteHook) -> nn.Module:
        assert site.module is not None
        for holder, name, child in site.steps():
            if child is None:
                self._lasting = False
            else:
                self._found[id(holder), name] = (weakref.ref(holder), name, weakref.ref(child))
        return site.module

    @property
    def holds(self) -> bool:
        """Whether every module still stands where it was found."""
        if not self._lasting:
            return False
        for holder, name, module in self._found.values():
            here, known = holder(), module()
            if here is None or known is None or here._modules.get(name) is not known:
                return False
        return True

    @property
    def is_free(self) -> bool:
        """Whether nobody else is at these places, who might change what is read."""
        sites = [place.site for place in self._places]
        return not any(site.points or site.watchers or site.readers for site in sites)

    @contextmanager
    def attached(self, keep: Keep, scope: Scope | None) -> Iterator[None]:
        """Reads inside a ``with`` statement, in runs that see a scope.

        Args:
            keep: is given what is read. It may keep the tensor, and must not change it.
            scope: the scope; None: all runs see it.
        """
        readers: list[tuple[ReadingHook, nn.Module]] = []
        try:
            for place in self._places:
                module = place.module()
                if module is None:
                    raise RuntimeError(missing_module_message(place.site.site.path))
                reader = ReadingHook(place, keep, scope)
                readers.append((reader, module))
                if place.before:
                    add_pre_hook(module, reader, reader.on_input)
                else:
                    add_forward_hook(module, reader, reader.on_output)
            yield
        finally:
            for reader, module in readers:
                remove_hooks_of(module, reader)
