"""How a run reads many activations at little cost: where it stands is worked out once, and read by one function each.

A cache of everything is at hundreds of places. To attach a listener to each hook point, and to ask each time who
sees what, costs as much as a small model's forward pass. Where nobody changes anything, none of that is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from adapters.points import call_number, missing_module_message
from adapters.views import Args, Kwargs
from bridge.hooks.context import CURRENT, Scope
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import NotCopied, argument, element_of
from bridge.wiring.site import OwnedHook, SiteHook, add_all, remove_all


class ReadSite:
    """One site that is read: its module, and the hook points that stand there.

    Attributes:
        points: all of them.
        names: of those that see the site's tensor as it is.
        views: the others: of these,
        waiting: name and view of those that can be computed later,
        at_once: those that cannot.
        contextual: views look at the call.
    """

    __slots__ = (
        "at_once", "before", "call", "contextual", "key", "module", "names", "points", "site", "views", "waiting",
    )  # fmt: skip

    def __init__(self, site: SiteHook, module: nn.Module, points: Sequence[HookPoint]) -> None:
        self.site, self.module = site, weakref.ref(module)
        self.points = tuple(points)
        self.names = tuple([point.name for point in points if point.view.identity])
        self.views = tuple([point for point in points if not point.view.identity])
        self.waiting = tuple([(point.name, point.view) for point in self.views if point.view.can_wait])
        self.at_once = tuple([point for point in self.views if not point.view.can_wait])
        self.contextual = any(point.view.contextual for point in self.views)
        self.key = site.site.key
        self.call = call_number(site.site.path)
        self.before = site.site.kind == "input"


#: What is called with what passed a place: it, the tensor, and the call: module, args, kwargs.
Keep = Callable[[ReadSite, Tensor, nn.Module, Args, Kwargs], None]


class _Turn:
    """Whose turn it is to use the hooks of all places.

    Attributes:
        reading: who is given what passes now, and the scope that the run sees; None: no run uses them.
    """

    __slots__ = ("reading",)

    def __init__(self) -> None:
        self.reading: tuple[Keep, Scope | None] | None = None


class ReadingHook(NotCopied):
    """The torch hook at one place. Runs use it one after the other.

    Args:
        place: the place; None in a copy, which does nothing.
        turn: of all hooks that the same run uses.
    """

    __slots__ = ("place", "turn")

    def __init__(self, place: ReadSite | None = None, turn: _Turn | None = None) -> None:
        if place is not None:
            self.place: ReadSite = place
        self.turn = _Turn() if turn is None else turn

    def on_output(self, module: nn.Module, args: Args, *rest: Any) -> None:
        """The forward hook: see `SiteHandler.on_output`."""
        reading, context = self.turn.reading, CURRENT.get()
        if reading is None or reading[1] not in context.visible:
            return  # another thread's run, which may also have ended by now
        place = self.place
        if place.call is None or (context.run is not None and context.run.is_call(module, place.call)):
            output, kwargs = rest[-1], rest[0] if len(rest) > 1 else {}
            x = output if isinstance(output, Tensor) else element_of(output, int(place.key or 0))
            reading[0](place, x, module, args, kwargs)

    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> None:
        """The forward pre-hook."""
        reading, context = self.turn.reading, CURRENT.get()
        if reading is None or reading[1] not in context.visible:
            return
        place = self.place
        if place.call is None or (context.run is not None and context.run.is_call(module, place.call)):
            plain = place.key is None and args and isinstance(args[0], Tensor)
            x = args[0] if plain else argument(module, args, kwargs or {}, place.key)[0]
            reading[0](place, x, module, args, kwargs or {})


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
        #: The modules that led to the places, and what was in each. A plan keeps none of them alive.
        self._holders: dict[int, tuple[weakref.ref[nn.Module], list[int]]] = {}
        self._lasting = True
        self._places = [ReadSite(site, self._find(site), at[site]) for site in at]
        self._modules = [place.module for place in self._places]
        #: Hooks for all places that no run uses now: runs of several threads have some each.
        self._idle: list[tuple[_Turn, list[OwnedHook]]] = []

    def _find(self, site: SiteHook) -> nn.Module:
        assert site.module is not None
        for holder, _, child in site.steps():
            self._lasting = self._lasting and child is not None
            self._holders[id(holder)] = (weakref.ref(holder), [*map(id, holder._modules.values())])
        return site.module

    @property
    def holds(self) -> bool:
        """Whether every module still stands where it was found.

        Each is held by another one or at a place: while all these live, none of their numbers is another module's.
        """
        if not self._lasting:
            return False
        for known, inside in self._holders.values():
            holder = known()
            if holder is None or [*map(id, holder._modules.values())] != inside:
                return False
        return None not in [module() for module in self._modules]

    @property
    def is_free(self) -> bool:
        """Whether nobody else is at these places, who might change what is read."""
        for place in self._places:
            site = place.site
            if site.points or site.watchers or site.readers:
                return False
        return True

    @contextmanager
    def attached(self, keep: Keep, scope: Scope | None) -> Iterator[None]:
        """Reads inside a ``with`` statement, in runs that see a scope.

        Args:
            keep: is given what is read. It may keep the tensor, and must not change it.
            scope: the scope; None: all runs see it.
        """
        found = [module() for module in self._modules]
        if None in found:
            raise RuntimeError(missing_module_message(self._places[found.index(None)].site.site.path))
        modules = cast(list[nn.Module], found)
        try:
            turn, hooks = self._idle.pop()
        except IndexError:
            turn, hooks = self._new_hooks()
        turn.reading = keep, scope
        try:
            add_all(modules, hooks)
            yield
        finally:
            turn.reading = None
            remove_all(modules, hooks)
            self._idle.append((turn, hooks))

    def _new_hooks(self) -> tuple[_Turn, list[OwnedHook]]:
        turn, made = _Turn(), []
        for place in self._places:
            hook = ReadingHook(place, turn)
            made.append(OwnedHook(id(hook), hook.on_input if place.before else hook.on_output, place.before))
        return turn, made
