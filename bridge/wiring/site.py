"""The torch hook at one site: a module's input or output that hook points stand on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapters.imports import checkpointing_method
from adapters.points import Site, call_number, core_path, module_path
from adapters.views import Args, Call, Kwargs
from adapters.views.views import NO_CALL
from bridge.hooks.context import CURRENT, ForwardPass, SourceSite
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import Finder, NotCopied, argument, element_of, with_argument, with_element
from bridge.sharing import SharedTensor


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

    def on_output(self, module: nn.Module, args: Args, *rest: Any) -> Any:
        """The forward hook: given `kwargs`, unless they are missing as above, and the output."""
        if not self.is_this_call(module):
            return None
        output, kwargs = rest[-1], rest[0] if len(rest) > 1 else {}
        if isinstance(output, Tensor):
            new = self.see(output, module, args, kwargs)
            return None if new is output else new
        place = int(self.site.key or 0)
        x = element_of(output, place)
        new = self.see(x, module, args, kwargs)
        return None if new is x else with_element(output, place, new)


class SiteHook(SiteHandler, SourceSite, NotCopied):
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
        self._last_writer: HookPoint | None = None

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return SiteHook, (self.site,)

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
            self._last_writer = None
            self.update()

    def watch(self, by: int) -> None:
        """One more (or less) who needs the tensor elsewhere."""
        self.watchers += by
        self.update()

    def claim(self, reader: HookPoint) -> Callable[[], None]:
        """Gives a reader copies of its own, until what is returned is called."""
        self.readers = (*self.readers, reader)
        self.update()

        def give_up() -> None:
            readers = list(self.readers)
            readers.remove(reader)
            self.readers = tuple(readers)
            self.update()

        return give_up

    def update(self) -> None:
        """Attaches or detaches the torch hook, as it is needed now."""
        before = self.site.kind == "input"
        hooks = (OwnedHook(id(self), self.on_input if before else self.on_output, before),)
        if not (self.points or self.watchers or self.readers):
            if self.attached_to is not None:
                remove_all((self.attached_to,), hooks)
                del self._attached[self]
            self.attached_to = None
        elif self.attached_to is None and self._find is not None:
            module = self.attached_to = self._find.module
            self._attached[self] = None
            add_all((module,), hooks)

    @property
    def is_in_place(self) -> bool:
        """Whether the module that the torch hook is on still stands there; true without a torch hook."""
        return self.attached_to is None or self._find is None or self._find.module is self.attached_to

    def listeners_changed(self) -> None:
        """Works out which points come before one that writes to the tensor in place: they keep copies."""
        writers = [
            point
            for point in self.points
            if point.view.writes_through and any(listener.kind != "read" for listener in point.listeners)
        ]
        self._last_writer = writers[-1] if writers else None  # at once: runs of other threads ask at every moment

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
        call, start, points, index = NO_CALL, None if run is None else run.start_at, self.points, -1
        while (index := index + 1) < len(points):
            point = points[index]
            if start is not None and point.point.depth < start:
                continue  # before the layer that this run starts at
            if point.sources:
                if not point.has_visible_listeners:
                    continue  # somebody else's, who may have come after this run had passed the sources
                if call is NO_CALL:
                    call = Call(module, args, kwargs)
                call.sources = point.sources_in(run)
            elif call is NO_CALL and point.view.contextual:
                call = Call(module, args, kwargs)
            writer = self._last_writer
            x = point.apply(x, call, writer is not None and point.order < writer.order)
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


class SharedSite(SiteHook):
    """Shows the whole of a tensor of which each process has a part, and cuts again what hooks make of it.

    Args:
        site, find, attached: as for `SiteHook`.
        shared: how its tensor is shared.
    """

    __slots__ = ("_shared", "reads_plainly")

    def __init__(self, site: Site, find: Finder, attached: dict[SiteHook, None], shared: SharedTensor) -> None:
        super().__init__(site, find, attached)
        self._shared, self.reads_plainly = shared, shared.is_plain

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Runs the points in turn, on the whole."""
        active = [point for point in self.points if point.has_visible_listeners]
        if not (active or self.watchers or self.readers):
            return x
        self._shared.check_in_place(module)
        # What is read separately, and some views, are computed from the module and its input.
        if self.readers or any(point.view.contextual for point in active):
            module, args = self._shared.whole_call(module, args)
        see = super().see
        return self._shared.agreed(x, active, lambda everything: see(everything, module, args, kwargs))


# ----------------------------------------------------------------------------------------------------------------------
# Torch hooks without handles: to make one and to remove with it takes longer than most of our hooks do.
#
# They stand in torch's own dictionaries, under the identity of their owner. No two owners have one while they live, and
# the numbers that torch gives out are small.
# ----------------------------------------------------------------------------------------------------------------------


class OwnedHook(NamedTuple):
    """A hook of ours at one module.

    Attributes:
        owner: the identity of who adds it.
        hook: the hook.
        before: it is a forward pre-hook.
    """

    owner: int
    hook: Callable[..., Any]
    before: bool


def add_all(modules: Iterable[nn.Module], hooks: Iterable[OwnedHook]) -> None:
    """Adds a hook, which is given keyword arguments too, to each of several modules.

    Args:
        modules: the modules.
        hooks: for each module, its hook.
    """
    for module, (owner, hook, before) in zip(modules, hooks, strict=True):
        told = module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs
        told[owner] = True
        (module._forward_pre_hooks if before else module._forward_hooks)[owner] = hook


def remove_all(modules: Iterable[nn.Module], hooks: Iterable[OwnedHook]) -> None:
    """Removes what `add_all` added, where it is there.

    Args:
        modules, hooks: as for `add_all`.
    """
    for module, (owner, _, before) in zip(modules, hooks, strict=True):
        (module._forward_pre_hooks if before else module._forward_hooks).pop(owner, None)
        (module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs).pop(owner, None)


# ----------------------------------------------------------------------------------------------------------------------
# What a gradient at the norm before attention means in HookedTransformer, which runs that norm three times.
#
# Queries, keys and values each read a norm of their own there, so a gradient hook on it sees three gradients, one after
# the other. A Hugging Face model runs the norm once. While somebody asks for such gradients
# (`Point.separate_consumers` names the readers), each reader is given a copy of its own; nobody else pays for it.
# ----------------------------------------------------------------------------------------------------------------------


def separate_readers(points: Iterable[HookPoint]) -> tuple[str, ...]:
    """The points that read this site one by one, when the present code asks for gradients here."""
    context = CURRENT.get()
    for point in points:
        if point.point.separate_consumers:
            for listener in point.listeners:
                if listener.kind in ("bwd", "edge") and listener.scope in context.visible:
                    return point.point.separate_consumers
    return ()


def read_separately(readers: tuple[str, ...], run: ForwardPass, compute: Callable[[], Tensor]) -> Tensor:
    """Computes the tensor once for each reader, in HookedTransformer's order, so that gradients arrive in its order."""
    copies = {reader: compute() for reader in readers}
    run.separate.update(copies)
    return copies[readers[0]]


def give_own_copy(reader: HookPoint, site: Site, run: ForwardPass, x: Tensor, call: Call) -> Tensor:
    """Gives a reader its copy: at its projection's input, or for its part of a fused projection's output."""
    entered = run.separate.pop(reader.name, None)
    if entered is None:
        return x
    if site.kind == "input":
        return entered
    return reader.view.put(x, reader.view.get(call.module.forward(entered), call), call)


# ----------------------------------------------------------------------------------------------------------------------
# Counting the calls of modules that run several times in a pass, of which each has hook points of its own.
# ----------------------------------------------------------------------------------------------------------------------


class CallCounter(NotCopied):
    """Counts, in each pass, the calls of modules that run several times.

    Nothing is attached for a model that has none, or while nobody may listen.

    Attributes:
        modules: finds those modules, by path.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Finder] = {}
        self._core: Finder | None = None
        self._handles: list[RemovableHandle] = []
        self._users, self._lock = 0, threading.Lock()

    def add(self, root: nn.Module, paths: Iterable[str]) -> None:
        """Takes in the modules at paths that mean one of a module's calls."""
        for path in paths:
            if call_number(path) is not None:
                self._core = Finder(root, core_path(root))
                self.modules[module_path(path)] = Finder(root, path)

    def change(self, by: int) -> None:
        """One more (or less) who needs to know."""
        assert self._core is not None
        with self._lock:
            before, self._users = self._users, self._users + by
            if not before and self._users:
                self._handles.append(self._core.module.register_forward_pre_hook(self.restart, prepend=True))
                for finder in self.modules.values():
                    self._handles.append(finder.module.register_forward_pre_hook(self.count, prepend=True))
            elif before and not self._users:
                while self._handles:
                    self._handles.pop().remove()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts inside a ``with`` statement."""
        self.change(1)
        try:
            yield
        finally:
            self.change(-1)

    def restart(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """The forward pre-hook of the model, which a generation calls for each of its steps."""
        run = CURRENT.get().run
        if run is not None and self._handles:
            run.calls.clear()

    def count(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """The forward pre-hook: before those of all others."""
        run = CURRENT.get().run
        if run is not None and self._handles:
            run.calls[module] = run.calls.get(module, 0) + 1
