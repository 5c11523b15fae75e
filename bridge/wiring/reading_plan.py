"""Plans for reading many activations cheaply: sites are resolved once, with one function per site.

A full cache reads hundreds of sites. Attaching a listener to each hook point, and checking each
time which scopes see it, would cost as much as a small model's forward pass. Without editors, none
of that is needed.
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
from bridge.modules import NotCopied, argument, element_of
from bridge.wiring.site import OwnedHook, SiteHook, add_all, remove_all


class ReadSite:
    """A site that is read: its module, and its hook points.

    Attributes:
        points: all of them.
        names: the names of the hook points whose activation is the site's tensor itself.
        views: the other hook points. Of these,
        waiting: name and view of hook points that can be computed later,
        at_once: the remaining ones.
        contextual: whether views need the module's call.
    """

    __slots__ = (
        "at_once",
        "before",
        "call",
        "contextual",
        "key",
        "module",
        "names",
        "points",
        "site",
        "views",
        "waiting",
    )

    def __init__(self, site: SiteHook, module: nn.Module, points: Sequence[HookPoint]) -> None:
        self.site, self.module = site, weakref.ref(module)
        self.points = tuple(points)
        self.names = tuple([point.name for point in points if point.view.identity])
        self.views = tuple([point for point in points if not point.view.identity])
        waiting = [point for point in self.views if point.view.can_wait]
        self.waiting = tuple([(point.name, point.view) for point in waiting])
        self.at_once = tuple([point for point in self.views if not point.view.can_wait])
        self.contextual = any(point.view.contextual for point in self.views)
        self.key = site.site.key
        self.call = call_number(site.site.path)
        self.before = site.site.kind == "input"


#: A function that is called with the tensor at a site and the call: tensor, module, args, kwargs.
Keep = Callable[[ReadSite, Tensor, nn.Module, Args, Kwargs], None]


class _Turn:
    """A lock: at most one reader uses the hooks of all sites at a time.

    Attributes:
        reading: the reader that currently receives the tensors, and the scope that its run sees;
            None if no run uses the hooks.
    """

    __slots__ = ("reading",)

    def __init__(self) -> None:
        self.reading: tuple[Keep, Scope | None] | None = None


class ReadingHook(NotCopied):
    """The torch hook at one site. Runs use it one after the other.

    Args:
        place: the site; None in a copied model, where the hook does nothing.
        turn: the lock shared by all hooks that the same run uses.
    """

    __slots__ = ("place", "turn")

    def __init__(self, place: ReadSite | None = None, turn: _Turn | None = None) -> None:
        if place is not None:
            self.place: ReadSite = place
        self.turn = _Turn() if turn is None else turn

    def on_output(self, module: nn.Module, args: Args, *rest: Any) -> None:
        """Read the output, as a forward hook; see `SiteHandler.on_output`."""
        reading, context = self.turn.reading, CURRENT.get()
        if reading is None or reading[1] not in context.visible:
            return  # another thread's run, which may also have ended by now
        place = self.place
        if place.call is None or (
            context.run is not None and context.run.is_call(module, place.call)
        ):
            output = rest[-1]
            kwargs = rest[0] if len(rest) > 1 else {}
            x = output if isinstance(output, Tensor) else element_of(output, int(place.key or 0))
            reading[0](place, x, module, args, kwargs)

    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> None:
        """Read the input, as a forward pre-hook."""
        reading, context = self.turn.reading, CURRENT.get()
        if reading is None or reading[1] not in context.visible:
            return
        place = self.place
        if place.call is None or (
            context.run is not None and context.run.is_call(module, place.call)
        ):
            plain = place.key is None and args and isinstance(args[0], Tensor)
            x = args[0] if plain else argument(module, args, kwargs or {}, place.key)[0]
            reading[0](place, x, module, args, kwargs or {})


class ReadingPlan:
    """The sites of a run that reads certain hook points.

    Args:
        points: the hook points.
        sites: for each hook point, the torch hook of its site; None where a tap serves it.

    Attributes:
        points: the hook points.
        others: hook points read by ordinary listeners: points inside a forward, points that need
            another site, points called by a user's module, and points whose tensor is sharded.
    """

    def __init__(
        self, points: Sequence[HookPoint], sites: Mapping[HookPoint, SiteHook | None]
    ) -> None:
        self.points = list(points)
        self.others: list[HookPoint] = []
        by_site: dict[SiteHook, list[HookPoint]] = {}
        for point in points:
            site = sites[point]
            if site is None or point.sources or site.module is None or not site.reads_plainly:
                self.others.append(point)
            else:
                by_site.setdefault(site, []).append(point)
        #: The modules on the paths to the sites, and their children. A plan keeps none of them
        #: alive.
        self._holders: dict[int, tuple[weakref.ref[nn.Module], list[int]]] = {}
        self._lasting = True
        self._places = [ReadSite(site, self._find(site), read) for site, read in by_site.items()]
        self._modules = [place.module for place in self._places]
        #: Unused hooks for all sites: runs of several threads have separate ones.
        self._idle: list[tuple[_Turn, list[OwnedHook]]] = []

    def _find(self, site: SiteHook) -> nn.Module:
        assert site.module is not None
        for holder, _, child in site.steps():
            self._lasting = self._lasting and child is not None
            self._holders[id(holder)] = (weakref.ref(holder), [*map(id, holder._modules.values())])
        return site.module

    @property
    def holds(self) -> bool:
        """Tell whether every module is unchanged since the plan was made.

        Each module is referenced by its parent or at a site; while all are alive, their ids are
        unique.
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
        """Tell whether these sites have no other users, who might change the activations."""
        for place in self._places:
            site = place.site
            if site.points or site.watchers or site.readers:
                return False
        return True

    @contextmanager
    def attached(self, keep: Keep, scope: Scope | None) -> Iterator[None]:
        """Read inside a ``with`` statement, in runs that see a scope.

        Args:
            keep: receives what is read. It may keep the tensor, but must not change it.
            scope: the scope; None: all runs see it.
        """
        live = [module() for module in self._modules]
        if None in live:
            missing = self._places[live.index(None)].site.site
            raise RuntimeError(missing_module_message(missing.path))
        modules = cast(list[nn.Module], live)
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
        turn, hooks = _Turn(), []
        for place in self._places:
            hook = ReadingHook(place, turn)
            function = hook.on_input if place.before else hook.on_output
            hooks.append(OwnedHook(id(hook), function, place.before))
        return turn, hooks
