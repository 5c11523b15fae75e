"""The torch hook at one site: a module's input or output that hook points stand on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from adapters.imports.versions import checkpointing_method
from adapters.paths import module_path
from adapters.points import Site
from adapters.views import Args, Call, Kwargs
from bridge.hooks.context import CURRENT, ForwardPass
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.modules import Finder, argument, element_of, with_argument, with_element
from bridge.wiring.separate_reads import give_own_copy, read_separately, separate_readers
from bridge.wiring.torch_hooks import add_forward_hook, add_pre_hook, remove_forward_hook, remove_pre_hook

#: For views that do not look at the call.
_NO_CALL = Call(nn.Identity(), (), {})


class SiteHandler:
    """What is at a module's input or output, in a run or in a program.

    Attributes:
        site: the site.
    """

    __slots__ = ()

    site: Site

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """What becomes of the tensor that passes."""
        raise NotImplementedError

    def is_this_call(self, module: nn.Module) -> bool:
        """Whether this call of the module is the one that is meant."""
        return True

    # `kwargs` may be missing: another thread may be registering this very hook while a forward pass runs.
    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> Any:
        """The forward pre-hook."""
        if not self.is_this_call(module):
            return None
        kwargs = {} if kwargs is None else kwargs
        plain = self.site.key is None
        x, place = (
            (args[0], 0)
            if plain and args and isinstance(args[0], Tensor)
            else argument(module, args, kwargs, self.site.key)
        )
        new = self.see(x, module, args, kwargs)
        return None if new is x else with_argument(args, kwargs, place, new)

    def on_output(self, module: nn.Module, args: Args, output: Any) -> Any:
        """The forward hook."""
        if not self.is_this_call(module):
            return None
        if isinstance(output, Tensor):
            new = self.see(output, module, args, {})
            return None if new is output else new
        place = int(self.site.key or 0)
        x = element_of(output, place)
        new = self.see(x, module, args, {})
        return None if new is x else with_element(output, place, new)


class SiteHook(SiteHandler):
    """The torch hook on one site: there while somebody needs it.

    Args:
        site: the site.
        find: finds its module.
        attached: all hooks of a bridge that are on a module now, this one among them while it is, in turn.

    Attributes:
        points: the hook points that have listeners here, in the order of their declaration.
        watchers: how many points elsewhere need the tensor seen here.
        attached_to: the module that the torch hook is on now.
        readers: the hook points behind this site that may be given a copy of their own: `Point.separate_consumers`.
    """

    #: Whether what passes here may be shown as it is.
    reads_plainly = True

    __slots__ = ("_attached", "_find", "_last_writer", "attached_to", "points", "readers", "site", "watchers")

    def __init__(self, site: Site, find: Finder | None = None, attached: dict[SiteHook, None] | None = None) -> None:
        self.site = site
        self._attached = {} if attached is None else attached
        self.points: tuple[HookPoint, ...] = ()
        self.watchers = 0
        self.readers: tuple[HookPoint, ...] = ()
        self._find = find
        self.attached_to: nn.Module | None = None
        self._last_writer = -1

    # A copy of a model that has hooks attached carries inert ones: hooks belong to one bridge.
    def __reduce__(self) -> tuple[Any, ...]:
        return SiteHook, (self.site,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteHook:
        return SiteHook(self.site)

    @property
    def module(self) -> nn.Module | None:
        """The module that it stands on; None in a copy."""
        return None if self._find is None else self._find.module

    def steps(self) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
        """The steps that lead to its module (see `Finder.steps`)."""
        return iter(()) if self._find is None else self._find.steps()

    def add(self, point: HookPoint) -> None:
        """Lets a hook point see what passes here."""
        if not self.points or self.points[-1].order < point.order:
            self.points = (*self.points, point)
        else:
            self.points = tuple(sorted((*self.points, point), key=lambda p: p.order))
        if len(self.points) > 1 and self.points[-1].view.writes_through:
            self.listeners_changed()  # what was alone before it writes after this one
        if self.attached_to is None:
            self.update()

    def discard(self, point: HookPoint) -> None:
        """The reverse of `add`."""
        self.points = tuple([p for p in self.points if p is not point])
        if self.points:
            self.listeners_changed()
        else:
            self._last_writer = -1
            self.update()

    def update(self) -> None:
        """Attaches or detaches the torch hook, as it is needed now."""
        if not (self.points or self.watchers or self.readers):
            if self.attached_to is not None:
                remove = remove_pre_hook if self.site.kind == "input" else remove_forward_hook
                remove(self.attached_to, self)
                del self._attached[self]
            self.attached_to = None
        elif self.attached_to is None and self._find is not None:
            module = self.attached_to = self._find.module
            self._attached[self] = None
            if self.site.kind == "input":
                add_pre_hook(module, self, self.on_input)
            else:
                add_forward_hook(module, self, self.on_output)

    @property
    def is_in_place(self) -> bool:
        """Whether the module that the torch hook is on still stands there; true without a torch hook."""
        return self.attached_to is None or self._find is None or self._find.module is self.attached_to

    def listeners_changed(self) -> None:
        """Works out which points come before one that writes to the tensor in place: they keep copies."""
        self._last_writer = -1
        for index, point in enumerate(self.points):
            if point.view.writes_through and any(listener.kind != "read" for listener in point.listeners):
                self._last_writer = index

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Runs the points in turn, and keeps the tensor for those who need it elsewhere."""
        run = CURRENT.get().run
        if run is None and torch._C._current_graph_task_id() != -1:
            self._refuse_recomputation()
        if self.readers and run is not None and run.separate:
            for reader in self.readers:
                x = give_own_copy(reader, self.site, run, x, Call(module, args, kwargs))
        readers = separate_readers(self.points) if torch.is_grad_enabled() else ()
        if readers and run is not None:
            x = read_separately(readers, run, lambda: self.pass_points(x.view_as(x), module, args, kwargs, run))
        else:
            x = self.pass_points(x, module, args, kwargs, run)
        if self.watchers and run is not None:
            run.sources[self] = (module, x)
        return x

    def pass_points(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs, run: ForwardPass | None) -> Tensor:
        """What the points make of the tensor, one after the other."""
        call, start, points, index = _NO_CALL, None if run is None else run.start_at, self.points, -1
        while (index := index + 1) < len(points):
            point = points[index]
            if start is not None and point.point.depth < start:
                continue  # before the layer that this run starts at
            if point.sources:
                if not point.has_visible_listeners:
                    continue  # somebody else's, who may have come after this run had passed the sources
                if call is _NO_CALL:
                    call = Call(module, args, kwargs)
                call.sources = point.sources_in(run)
            elif call is _NO_CALL and point.view.contextual:
                call = Call(module, args, kwargs)
            x = point.apply(x, call, index < self._last_writer)
            if self.points is not points:  # a trace that was shown this one has asked for another
                points = self.points
                index = sum(other.order <= point.order for other in points) - 1
        return x

    def _refuse_recomputation(self) -> None:
        """Refuses to guess which hooks a block that backward computes again was run with.

        Raises:
            RuntimeError: somebody listens here.
        """
        for point in self.points:
            if point.has_visible_listeners and any(listener.kind != "read" for listener in point.listeners):
                raise RuntimeError(
                    f"backward is computing {self.site.path} again (activation checkpointing), and the hooks at "
                    f"{point.name} are there now, but nothing says whether they were in the forward pass. Run the "
                    "forward pass with the hooks attached, and checkpoint with the model's own "
                    f"{checkpointing_method()}()"
                )

    def is_this_call(self, module: nn.Module) -> bool:
        """Whether this is the call that is meant, where the module runs several times.

        Raises:
            RuntimeError: it runs again for backward, out of the order in which calls are counted.
        """
        number = None if self._find is None else self._find.call
        if number is None:
            return True
        run = CURRENT.get().run
        if run is None or not run.calls:
            for point in self.points:
                if point.has_visible_listeners:
                    raise RuntimeError(
                        f"{point.name} is call {number} of {module_path(self.site.path)}, which runs several times, "
                        "and here nothing counts them (activation checkpointing runs it again, out of order): switch "
                        "checkpointing off"
                    )
            return False
        return run.is_call(module, number)
