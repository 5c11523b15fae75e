"""The torch hook at one site: a module's input or output with hook points."""

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
from adapters.torch_hooks import refuse_other_hooks
from adapters.views import Args, Call, Kwargs
from adapters.views.values import is_readable, same_bits
from adapters.views.views import NO_CALL
from bridge.hooks.context import CURRENT, ForwardPass, SourceSite
from bridge.hooks.hooks import HookPoint, keeps_values, wants_gradients
from bridge.modules import Finder, NotCopied, argument, element_of, with_argument, with_element
from bridge.sharing import SharedTensor


class SiteHandler:
    """A handler of a module's input or output, in a run or in a program.

    Attributes:
        site: the site.
    """

    __slots__ = ()

    site: Site

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Return the tensor with which the model continues, given the tensor at the site."""
        raise NotImplementedError

    def is_this_call(self, module: nn.Module) -> bool:
        """Tell whether this call of the module is the intended one."""
        return True

    # `kwargs` may be missing: another thread may be registering this very hook while a forward pass
    # runs.
    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> Any:
        """Handle the input, as a forward pre-hook."""
        if not self.is_this_call(module):
            return None
        kwargs = {} if kwargs is None else kwargs
        key = self.site.key
        if key is not None or not args or not isinstance(args[0], Tensor):
            x, place = argument(module, args, kwargs, key)
        else:
            x, place = args[0], 0
        new = self.see(x, module, args, kwargs)
        return None if new is x else with_argument(args, kwargs, place, new)

    def on_output(self, module: nn.Module, args: Args, *rest: Any) -> Any:
        """Handle the output, as a forward hook; `kwargs` may be missing."""
        if not self.is_this_call(module):
            return None
        output = rest[-1]
        kwargs = rest[0] if len(rest) > 1 else {}
        if isinstance(output, Tensor):
            new = self.see(output, module, args, kwargs)
            return None if new is output else new
        place = int(self.site.key or 0)
        x = element_of(output, place)
        new = self.see(x, module, args, kwargs)
        return None if new is x else with_element(output, place, new)


class SiteHook(SiteHandler, SourceSite, NotCopied):
    """The torch hook on one site, attached while it has users.

    Args:
        site: the site.
        find: returns its module.
        attached: the list of a bridge's currently attached hooks, to which this one is added while
            it is attached.

    Attributes:
        points: the hook points that have listeners here, in the order of their declaration.
        watchers: the number of points elsewhere that need this site's tensor.
        attached_to: the module that currently has the torch hook.
        readers: the later hook points that may receive separate copies, see
            `Point.separate_consumers`.
    """

    #: Whether tensors may be shown unchanged.
    reads_plainly = True

    __slots__ = (
        "_attached",
        "_find",
        "_front",
        "_last_writer",
        "attached_to",
        "points",
        "readers",
        "site",
        "watchers",
    )

    def __init__(
        self, site: Site, find: Finder | None = None, attached: dict[SiteHook, None] | None = None
    ) -> None:
        self.site = site
        self._attached = {} if attached is None else attached
        self.points: tuple[HookPoint, ...] = ()
        self.watchers = 0
        self.readers: tuple[HookPoint, ...] = ()
        self._find = find
        self._front: OwnedHook | None = None
        self.attached_to: nn.Module | None = None
        self._last_writer: HookPoint | None = None

    def left_in_copy(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return SiteHook, (self.site,)

    @property
    def module(self) -> nn.Module | None:
        """Return the module at the site; None in a copied model."""
        return None if self._find is None else self._find.module

    def steps(self) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
        """Return the steps to the module (see `Finder.steps`)."""
        return iter(()) if self._find is None else self._find.steps()

    def add(self, point: HookPoint) -> None:
        """Show this site's tensors to a hook point."""
        if not self.points or self.points[-1].order < point.order:
            self.points = (*self.points, point)
        else:
            self.points = tuple(sorted((*self.points, point), key=lambda p: p.order))
        if len(self.points) > 1 and self.points[-1].view.writes_through:
            self.listeners_changed()  # the formerly only point now writes after this one
        if self.attached_to is None:
            self.update()

    def discard(self, point: HookPoint) -> None:
        """Undo `add`."""
        self.points = tuple([p for p in self.points if p is not point])
        if self.points:
            self.listeners_changed()
        else:
            self._last_writer = None
            self.update()

    def watch(self, by: int) -> None:
        """Increment (or decrement) the number of users that need the tensor elsewhere."""
        self.watchers += by
        self.update()

    def claim(self, reader: HookPoint) -> Callable[[], None]:
        """Give a reader its own copies until the returned function is called."""
        self.readers = (*self.readers, reader)
        self.update()

        def give_up() -> None:
            readers = list(self.readers)
            readers.remove(reader)
            self.readers = tuple(readers)
            self.update()

        return give_up

    def update(self) -> None:
        """Attach or detach the torch hook, depending on whether it is needed."""
        before = self.site.kind == "input"
        hooks = (OwnedHook(id(self), self.on_input if before else self.on_output, before),)
        if not (self.points or self.watchers or self.readers):
            if self.attached_to is not None:
                remove_all((self.attached_to,), hooks)
                if self._front is not None:
                    remove_all((self.attached_to,), (self._front,))
                    self._front = None
                del self._attached[self]
            self.attached_to = None
        elif self.attached_to is None and self._find is not None:
            module = self.attached_to = self._find.module
            self._attached[self] = None
            add_all((module,), hooks)

    def precede(self) -> None:
        """Stand before the forward pre-hooks of others, too, since gradients are asked for here."""
        module = self.attached_to
        if module is None or self.site.kind != "input" or self._front is not None:
            return
        if len(module._forward_pre_hooks) > 1 and call_number(self.site.path) is None:
            front = InputFront(self)
            self._front = OwnedHook(id(front), front.on_input, True)
            add_all((module,), (self._front,))
            hooks: Any = module._forward_pre_hooks  # an ordered dict
            hooks.move_to_end(id(front), last=False)

    @property
    def is_in_place(self) -> bool:
        """Tell whether the hooked module is still at the site; true without a torch hook."""
        return (
            self.attached_to is None or self._find is None or self._find.module is self.attached_to
        )

    def listeners_changed(self) -> None:
        """Find the points that precede an in-place edit of the tensor: they keep copies."""
        last_writer: HookPoint | None = None
        for point in self.points:
            if point.view.writes_through and any(x.kind != "read" for x in point.listeners):
                last_writer = point
        self._last_writer = last_writer  # set once: runs of other threads read it at any moment

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Pass the tensor through this site's hook points, and return the result. Store it for
        hook points at other sites that read it in this run."""
        run = CURRENT.get().run
        if run is None and torch._C._current_graph_task_id() != -1:
            self._refuse_recomputation()
        if run is not None and run.fronts:
            self._pass_front(x, run)
        if self.readers and run is not None and run.separate:
            for reader in self.readers:
                x = give_own_copy(reader, self.site, run, x, Call(module, args, kwargs))
        readers = separate_readers(self.points) if torch.is_grad_enabled() else ()
        if readers and run is not None:
            x = read_separately(
                readers, run, lambda: self.pass_points(x.view_as(x), module, args, kwargs, run)
            )
        else:
            x = self.pass_points(x, module, args, kwargs, run)
        if self.watchers and run is not None:
            run.sources[self] = (module, x)
        return x

    def _pass_front(self, x: Tensor, run: ForwardPass) -> None:
        """Let hook points listen to gradients before the pre-hooks of others, if these left the
        values as they are, and began no graph of their own.
        """
        front, version, acts = run.fronts.pop(self, (x, 0, {}))
        if not acts or front._version != version:
            return
        if x is front or keeps_values(x, front):
            run.fronts.update((name, (x, act)) for name, act in acts.items())

    def pass_points(
        self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs, run: ForwardPass | None
    ) -> Tensor:
        """Pass the tensor through the points, one after the other, and return the result."""
        call, points, index = NO_CALL, self.points, -1
        start = None if run is None else run.start_at
        while (index := index + 1) < len(points):
            point = points[index]
            if start is not None and point.point.depth < start:
                continue  # before the layer that this run starts at
            if point.sources:
                if not point.has_visible_listeners:
                    # A listener of another run, added after this run had passed the sources.
                    continue
                if call is NO_CALL:
                    call = Call(module, args, kwargs)
                call.sources = point.sources_in(run)
            elif call is NO_CALL and point.view.contextual:
                call = Call(module, args, kwargs)
            writer = self._last_writer
            x = point.apply(x, call, writer is not None and point.order < writer.order)
            if self.points is not points:  # a trace that was shown this one has requested another
                points = self.points
                index = sum(other.order <= point.order for other in points) - 1
        return x

    def _refuse_recomputation(self) -> None:
        """Raise an error if this call is a recomputation in backward with unknown hooks.

        Raises:
            RuntimeError: it is, and there are listeners here.
        """
        for point in self.points:
            edits = any(listener.kind != "read" for listener in point.listeners)
            if edits and point.has_visible_listeners:
                raise RuntimeError(
                    f"backward is computing {self.site.path} again (activation checkpointing), and"
                    f" the hooks at {point.name} are there now, but nothing says whether they were"
                    " in the forward pass. Run the forward pass with the hooks attached, and"
                    f" checkpoint with the model's own {checkpointing_method()}()"
                )

    def is_this_call(self, module: nn.Module) -> bool:
        """Tell whether this call is the intended one, if the module runs several times.

        Raises:
            RuntimeError: backward recomputes the module, so that its calls cannot be counted.
        """
        number = None if self._find is None else self._find.call
        if number is None:
            return True
        run = CURRENT.get().run
        if run is None or not run.calls:
            for point in self.points:
                if point.has_visible_listeners:
                    raise RuntimeError(
                        f"{point.name} is call {number} of {module_path(self.site.path)}, which"
                        " runs several times, and here nothing counts them (activation"
                        " checkpointing runs it again, out of order): switch checkpointing off"
                    )
            return False
        return run.is_call(module, number)


class InputFront(NotCopied):
    """The torch hook before the forward pre-hooks of others at a module's input.

    A hook point shows the value that these leave. A function there that keeps it (it stops the
    gradient, or turns it) is a part of the model: the gradient is that of the model's own tensor,
    before it.

    Args:
        site: the site; None in a copy, which does nothing.
    """

    __slots__ = ("_site",)

    def __init__(self, site: SiteHook | None = None) -> None:
        self._site = site

    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> Any:
        """Show the input to the hook points that gradients are asked for at."""
        site, run = self._site, CURRENT.get().run
        if site is None or run is None or site.readers or not site.reads_plainly:
            return None
        kwargs = {} if kwargs is None else kwargs
        x, place = argument(module, args, kwargs, site.site.key)
        if not x.requires_grad or not is_readable(x):
            return None
        acts: dict[str, Tensor] = {}
        for point in site.points:
            plain = not (point.view.contextual or point.view.writes_through)
            if plain and wants_gradients(point.visible_listeners()):
                acts[point.name], x = point.in_front(x)
        if not acts:
            return None
        run.fronts[site] = x, x._version, acts
        return with_argument(args, kwargs, place, x)


class SharedSite(SiteHook):
    """A site whose tensor is sharded over processes: hooks see the gathered tensor, and it is
    sharded again.

    Args:
        site, find, attached: as for `SiteHook`.
        shared: how its tensor is shared.
    """

    __slots__ = ("_shared", "reads_plainly")

    def __init__(
        self, site: Site, find: Finder, attached: dict[SiteHook, None], shared: SharedTensor
    ) -> None:
        super().__init__(site, find, attached)
        self._shared, self.reads_plainly = shared, shared.is_plain

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Run the points in turn on the gathered tensor."""
        active = [point for point in self.points if point.has_visible_listeners]
        if not (active or self.watchers or self.readers):
            return x
        self._shared.check_in_place(module)
        # Separate readers, and some views, are computed from the module and its input.
        if self.readers or any(point.view.contextual for point in active):
            module, args = self._shared.whole_call(module, args)
        see = super().see
        return self._shared.agreed(x, active, lambda full: see(full, module, args, kwargs))


# --------------------------------------------------------------------------------------------------
# Torch hooks without handles: making and removing a handle takes longer than most of our hooks.
#
# They are in torch's own dictionaries, under the id of their owner. Live owners have unique ids,
# and the numbers that torch assigns are small.
# --------------------------------------------------------------------------------------------------


class OwnedHook(NamedTuple):
    """A hook of this package at one module.

    Attributes:
        owner: the id of its owner.
        hook: the hook.
        before: whether it is a forward pre-hook.
    """

    owner: int
    hook: Callable[..., Any]
    before: bool


def add_all(modules: Iterable[nn.Module], hooks: Iterable[OwnedHook]) -> None:
    """Add a hook, which also receives keyword arguments, to each of several modules.

    Args:
        modules: the modules.
        hooks: for each module, its hook.
    """
    for module, (owner, hook, before) in zip(modules, hooks, strict=True):
        if not before:
            module._forward_hooks_with_kwargs[owner] = True
            module._forward_hooks[owner] = hook
            continue
        module._forward_pre_hooks_with_kwargs[owner] = True
        module._forward_pre_hooks[owner] = hook


def remove_all(modules: Iterable[nn.Module], hooks: Iterable[OwnedHook]) -> None:
    """Remove the hooks that `add_all` added, if they are attached.

    Args:
        modules, hooks: as for `add_all`.
    """
    for module, (owner, _, before) in zip(modules, hooks, strict=True):
        if before:
            module._forward_pre_hooks.pop(owner, None)
            module._forward_pre_hooks_with_kwargs.pop(owner, None)
        else:
            module._forward_hooks.pop(owner, None)
            module._forward_hooks_with_kwargs.pop(owner, None)


# --------------------------------------------------------------------------------------------------
# The meaning of a gradient at the norm before attention in HookedTransformer, which runs that norm
# three times.
#
# Queries, keys and values each read their own norm there, so a gradient hook on it is called with
# three gradients, one after the other. A Hugging Face model runs the norm once. While a listener
# requests such gradients (`Point.separate_consumers` names the readers), each reader is given its
# own copy; other runs have no extra cost.
# --------------------------------------------------------------------------------------------------


def separate_readers(points: Iterable[HookPoint]) -> tuple[str, ...]:
    """Return the points that read this site separately, if gradients are requested here."""
    context = CURRENT.get()
    for point in points:
        if point.point.separate_consumers:
            for listener in point.listeners:
                if listener.kind in ("bwd", "edge") and listener.scope in context.visible:
                    return point.point.separate_consumers
    return ()


def read_separately(
    readers: tuple[str, ...], run: ForwardPass, compute: Callable[[], Tensor]
) -> Tensor:
    """Compute the tensor once for each reader, in HookedTransformer's order, so that gradients
    arrive in the same order.
    """
    copies = {reader: compute() for reader in readers}
    first = copies[readers[0]]
    run.separate.update({reader: (copy, first) for reader, copy in copies.items()})
    return first


def _is_same(x: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same numbers, possibly in another shape."""
    if x.numel() != other.numel() or x.dtype != other.dtype:
        return False
    return same_bits(x.reshape(other.shape), other)


def give_own_copy(reader: HookPoint, site: Site, run: ForwardPass, x: Tensor, call: Call) -> Tensor:
    """Pass a reader its copy, at its projection's input or for its part of a fused projection.

    Raises:
        RuntimeError: the model did not continue with the copies, so a change would be lost.
    """
    entered, first = run.separate.pop(reader.name, (None, None))
    if entered is None or first is None:
        return x
    is_input = site.kind == "input"
    read = x if is_input else argument(call.module, call.args, call.kwargs, None)[0]
    if read is not first and not _is_same(read, first):
        raise RuntimeError(
            f"gradients are requested at the norm that {reader.name} reads, so it gets its own copy"
            " of the norm's output; but a torch hook, or the model, changes this output in"
            " between, and the change would be lost. Request these gradients in a run without the"
            " torch hook"
        )
    if is_input:
        return entered
    refuse_other_hooks(x, call.module, call.input, call)
    return reader.view.put(x, reader.view.get(call.module.forward(entered), call), call)


# --------------------------------------------------------------------------------------------------
# Call counts of modules that run several times in a pass, with separate hook points for each call.
# --------------------------------------------------------------------------------------------------


class CallCounter(NotCopied):
    """A counter, per pass, of the calls of modules that run several times.

    Nothing is attached for a model without such modules, or without possible listeners.

    Attributes:
        modules: returns these modules, by path.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Finder] = {}
        self._core: Finder | None = None
        self._handles: list[RemovableHandle] = []
        self._users, self._lock = 0, threading.Lock()

    def add(self, root: nn.Module, paths: Iterable[str]) -> None:
        """Register the modules at paths with call numbers."""
        for path in paths:
            if call_number(path) is not None:
                self._core = Finder(root, core_path(root))
                self.modules[module_path(path)] = Finder(root, path)

    def change(self, by: int) -> None:
        """Increment (or decrement) the number of users."""
        assert self._core is not None
        with self._lock:
            before, self._users = self._users, self._users + by
            if not before and self._users:
                self._attach(self._core, self.restart)
                for finder in self.modules.values():
                    self._attach(finder, self.count)
            elif before and not self._users:
                while self._handles:
                    self._handles.pop().remove()

    def _attach(self, finder: Finder, hook: Callable[..., None]) -> None:
        handle = finder.module.register_forward_pre_hook(hook, prepend=True)
        self._handles.append(handle)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count calls inside a ``with`` statement."""
        self.change(1)
        try:
            yield
        finally:
            self.change(-1)

    def restart(self, module: nn.Module, args: Args) -> None:
        """Reset the counts, as a pre-hook of the model, which runs at each step of a generation."""
        run = CURRENT.get().run
        if run is not None and self._handles:
            run.calls.clear()

    def count(self, module: nn.Module, args: Args) -> None:
        """Count a call, as a forward pre-hook that runs before all others."""
        run = CURRENT.get().run
        if run is not None and self._handles:
            run.calls[module] = run.calls.get(module, 0) + 1
