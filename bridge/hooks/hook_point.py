"""`HookPoint`: a named place in a model where functions can read and change an activation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from adapters.points import Point
from adapters.views import Call, Deferred, View
from bridge.hooks.context import CURRENT, Pass, PassMemory, SourceSite
from bridge.hooks.listener import HookFunction, Kind, Listener
from bridge.hooks.recomputation import refuse_older_checkpointing, refuse_unknown_recomputation
from bridge.hooks.results import checked, listen_backward, replaces_activation, version_of, wants_gradients
from bridge.hooks.shown import copy_to_show, keep_gradients_of_all

__all__ = ["HookPoint"]

T = TypeVar("T")


class AttachesListeners(Protocol):
    """What attaches listeners to hook points, and detaches them."""

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attaches a listener."""

    def remove(self, point: HookPoint, gone: tuple[Listener, ...]) -> None:
        """Removes listeners."""

    def compared(self, make: Callable[[], T], given: Tensor, point: HookPoint) -> T:
        """What a function makes of a gradient, if processes that share the model make the same of it."""


class Attachment:
    """A listener at its hook point.

    Args:
        hook: the hook point.
        listener: the listener.
        attaches: attaches and removes it.

    Attributes:
        hook, listener: likewise.
    """

    def __init__(self, hook: HookPoint, listener: Listener, attaches: AttachesListeners) -> None:
        self.hook, self.listener, self._attaches = hook, listener, attaches

    def attach(self) -> None:
        """Attaches it, if it is not attached already."""
        if self.listener not in self.hook.listeners:
            self._attaches.add(self.hook, self.listener)

    def remove(self) -> None:
        """Removes it. Doing it twice does nothing."""
        self._attaches.remove(self.hook, (self.listener,))


class Handle(Attachment):
    """Takes back what one `add_hook` added.

    Attributes:
        hook: the hook point.
    """

    @property
    def id(self) -> int:
        """A number that no other hook has while this one is there."""
        return id(self.listener)

    @property
    def function(self) -> HookFunction:
        """The user's function."""
        return self.listener.fn

    @property
    def is_permanent(self) -> bool:
        """Whether only `reset_hooks` with ``including_permanent=True`` removes it."""
        return self.listener.permanent

    @property
    def context_level(self) -> int | None:
        """The level that it was added at."""
        return self.listener.level

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.listener is other.listener

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class HookPoint:
    """A place where an activation can be read and changed.

    Attributes:
        name: the canonical name, such as ``blocks.3.attn.hook_z``.
        ctx: a dictionary for the user's hook functions to keep state in.
        point: the adapter's declaration: its axes, aliases, site and view.
        one_tensor: where gradients are computed, all functions are shown one tensor, as in HookedTransformer: what a
            later one writes into it, or asks of its gradient, an earlier one that holds it sees. What a cache has
            kept stays all the same.
    """

    one_tensor: ClassVar[bool] = False

    __slots__ = ("_attaches", "_path", "ctx", "listeners", "name", "order", "point", "sources", "view")

    def __init__(self, point: Point, order: int, attaches: AttachesListeners) -> None:
        self.name = point.name
        self.point = point
        self.view = point.view
        self.order = order
        self.ctx: dict[Any, Any] = {}
        self.listeners: tuple[Listener, ...] = ()
        #: The torch hooks at the sites whose tensors the view needs.
        self.sources: tuple[SourceSite, ...] = ()
        self._attaches = attaches
        self._path: Callable[[HookPoint, Tensor, Call, bool, View], Tensor] = HookPoint._read

    def __repr__(self) -> str:
        hooks = f", {len(self.listeners)} hooks" if self.listeners else ""
        return f"HookPoint({self.name}: [{self.point.axes}]{hooks})"

    @property
    def fwd_hooks(self) -> list[Handle]:
        """The functions that were added to it, by their handles."""
        return [Handle(self, listener, self._attaches) for listener in self.listeners if listener.kind == "fwd"]

    @property
    def bwd_hooks(self) -> list[Handle]:
        """The functions of gradients that were added to it, by their handles."""
        return [Handle(self, listener, self._attaches) for listener in self.listeners if listener.kind == "bwd"]

    def add_listener(self, listener: Listener, prepend: bool = False) -> None:
        """Adds a listener, and chooses what is done with an activation while it is there."""
        self.listeners = (listener, *self.listeners) if prepend else (*self.listeners, listener)
        if listener.kind in ("bwd", "edge"):
            self._path = HookPoint._edit_with_gradients
        elif listener.kind != "read" and self._path is HookPoint._read:
            self._path = HookPoint._edit

    def keep_listeners(self, left: Iterable[Listener]) -> None:
        """Takes all listeners away but these."""
        self.listeners, self._path = (), HookPoint._read
        kept = tuple(left)
        if not kept:
            return
        for one in {listener.kind: listener for listener in kept}.values():  # the path depends on their kinds
            self.add_listener(one)
        self.listeners = kept

    def layer(self) -> int:
        """The index of the block that the hook point belongs to.

        Raises:
            ValueError: it belongs to no block.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.blocks[2].attn.hook_z.layer()
            2
        """
        if not self.point.stack:
            raise ValueError(f"{self.name} belongs to no layer")
        return self.point.depth

    def add_hook(
        self,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Adds a function that sees, and may change, the activation in every run, of any thread, until it is removed.

        Args:
            hook: called as ``hook(activation, hook=point)`` with the activation (or, with ``dir="bwd"``, its gradient).
                It may return a new tensor of the same shape, or change the given one in place, or neither.
            dir: ``"fwd"`` or ``"bwd"``.
            is_permanent: only `reset_hooks` with ``including_permanent=True`` removes it.
            level: a number that `reset_hooks` can be told to remove alone.
            prepend: run it before the functions that are already there.

        Returns:
            A handle with `remove()`.

        Raises:
            ValueError: `dir` is neither ``"fwd"`` nor ``"bwd"``.
            ValueError: or the function does not fit the activation here.
            TypeError: `hook` cannot be called.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> handle = bridge.blocks[0].hook_mlp_out.add_hook(lambda activation, hook: activation * 0)
            >>> handle.remove()
        """
        if dir not in ("fwd", "bwd"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd" or "bwd"')
        listener = Listener(cast(Kind, dir), checked_function(self, hook), None, is_permanent, level)
        self._attaches.add(self, listener, prepend)
        return Handle(self, listener, self._attaches)

    def add_perma_hook(self, hook: HookFunction, dir: str = "fwd") -> Handle:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise.

        Args:
            hook, dir: as for `add_hook`.
        """
        return self.add_hook(hook, dir, is_permanent=True)

    def remove_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the hooks that were added. Those of a running ``with`` statement or cache go with it.

        Args:
            dir: which of them.
            including_permanent: permanent ones too.
            level: only those that were added at this level.

        Raises:
            ValueError: `dir` is none of the three.
        """
        if dir not in ("fwd", "bwd", "both"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd", "bwd" or "both"')
        kinds = ("fwd", "bwd") if dir == "both" else (dir,)
        gone = tuple(
            listener
            for listener in self.listeners
            if listener.scope is None
            and listener.kind in kinds
            and (including_permanent or not listener.permanent)
            and (level is None or listener.level == level)
        )
        self._attaches.remove(self, gone)

    def clear_context(self) -> None:
        """Empties `ctx`."""
        self.ctx = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the hooks on a tensor as if the model had computed it here, and returns what they make of it."""
        return self._path(self, x, Call(nn.Identity(), (x,), {}), False, View())

    def apply(self, x: Tensor, call: Call, copy: bool = False) -> Tensor:
        """Shows the tensor at the site to the listeners that the present code sees.

        Args:
            x: the tensor.
            call: the module call that it belongs to.
            copy: the tensor will be written to afterwards, so what is kept of it has to be a copy.

        Returns:
            What the tensor at the site is to be: `x` itself where nobody changed anything.
        """
        return self._path(self, x, call, copy, self.view)

    @property
    def has_visible_listeners(self) -> bool:
        """Whether the present code sees any of its listeners."""
        visible = CURRENT.get().visible
        return any(listener.scope in visible for listener in self.listeners)

    def visible_listeners(self) -> list[Listener]:
        """Its listeners that the present code sees."""
        visible = CURRENT.get().visible
        return [listener for listener in self.listeners if listener.scope in visible]

    def sources_seen(self) -> tuple[tuple[nn.Module, Tensor], ...]:
        """What the present pass saw at the sites whose tensors the view needs (see `sources_in`)."""
        return self.sources_in(CURRENT.get().run)

    def sources_in(self, run: PassMemory | None) -> tuple[tuple[nn.Module, Tensor], ...]:
        """What a pass saw at the sites whose tensors the view needs: the module called there, the tensor.

        Args:
            run: what the pass remembers.

        Raises:
            RuntimeError: it did not come past them.
        """
        seen = [] if run is None else [run.tensor_at(source) for source in self.sources]
        found = [source for source in seen if source is not None]
        if len(found) < len(self.sources):
            where = ", ".join(source.site.path for source in self.sources)
            raise RuntimeError(
                f"{self.name} is seen with the help of what passes {where}, which did not run before it: call the "
                "whole model, not a part of it"
            )
        return tuple(found)

    # One of the following three is `_path`, chosen when listeners come and go.

    def _read(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Only looks. This runs hundreds of times in a run that caches everything."""
        visible = CURRENT.get().visible
        for listener in self.listeners:
            if listener.scope in visible:
                waits = listener.deferrable and not (copy or torch.is_grad_enabled() or x.is_inference())
                if view.deferrable and (waits or (listener.partial and view.by_row)):
                    listener.fn(Deferred(view, x, call), hook=self)
                    continue
                if view.identity:
                    act = x
                elif torch.is_grad_enabled():
                    with torch.no_grad():  # what is only looked at is no part of the graph
                        act = view.get(x, call)
                else:
                    act = view.get(x, call)
                listener.fn(act.clone() if copy else act, hook=self)
        return x

    def _edit(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Lets the user's functions look at the activation and change it."""
        context = CURRENT.get()
        mine = [listener for listener in self.listeners if listener.scope in context.visible]
        for listener in mine:
            if listener.kind != "read":
                break
        else:
            return self._read(x, call, copy, view) if mine else x
        if context.run is not None and context.run.gradients:
            refuse_unknown_recomputation(self.name)
        return self.edited(x, call, context, mine, copy, view)

    def _edit_with_gradients(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """As `_edit`, and shows the gradient at the activation that later computation uses."""
        context = CURRENT.get()
        mine = self.visible_listeners()
        if not wants_gradients(mine):
            return self._edit(x, call, copy, view)
        act, changed = self._asked(mine, self._seen(x, call, copy, view), context, view)
        if context.run is not None and context.run.gradients:
            refuse_unknown_recomputation(self.name)
        backward = (
            [listener for listener in mine if listener.kind in ("bwd", "edge")] if act.is_floating_point() else []
        )
        if backward:
            refuse_older_checkpointing()
        if backward and not act.requires_grad:
            # Nothing before this point wants a gradient (frozen weights): the graph starts here.
            act, changed = act.detach().clone().requires_grad_(), True
        elif backward and not view.identity:
            changed = True  # the gradient has to flow through the activation as it is seen
        x = self._put(x, act, changed, call, context, view)
        for listener in backward:
            listen_backward(listener, x if view.identity else act, self, self._compared)
        return x

    def _compared(self, make: Callable[[], Any], given: Tensor) -> Any:
        return self._attaches.compared(make, given, self)

    # What a hook does at a site, in a run and in a program: they differ in the pass.

    def edited(self, x: Tensor, call: Call, now: Pass, mine: Sequence[Listener], copy: bool, view: View) -> Tensor:
        """What listeners make of the tensor at the site.

        Args:
            x: the tensor.
            call: the module call that it belongs to.
            now: the pass.
            mine: the listeners, in turn.
            copy: the tensor will be written to afterwards.
            view: how the activation is seen.
        """
        own = call.private and len(mine) == 1 and view.identity and not torch.is_grad_enabled()
        act, changed = self._asked(mine, self._seen(x, call, copy, view), now, view, own)
        return self._put(x, act, changed, call, now, view)

    @staticmethod
    def _seen(x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """The activation, as a copy where the site's tensor is about to be written to."""
        act = x if view.identity else view.get(x, call)
        if act.is_sparse:
            return act.to_dense()
        return act.clone() if copy or view.writes_through else act

    def _asked(
        self, mine: Sequence[Listener], act: Tensor, now: Pass, view: View, own: bool = False
    ) -> tuple[Tensor, bool]:
        """What listeners make of the activation, in turn, and whether anything came of it.

        Each function is shown a copy of its own, so that nothing that somebody holds can change under it, and the next
        one a copy of that: what one was shown is on the way to what the next one sees. An activation that is its `own`
        needs no copy.
        """
        shown: list[Tensor] = []
        changed = kept = False
        for listener in mine:
            new: Tensor | None = None
            if listener.kind == "fwd":
                given = act if own else copy_to_show(act, shown, self.one_tensor and not kept)
                act, made = self._ask(listener, given, act, now, view)
                changed = changed or made
                keep_gradients_of_all(given, shown)
                shown.append(given)
            elif listener.kind == "read":
                now.show(listener, act, self)
                kept = True
            elif listener.kind == "follow":
                new = listener.fn(act, hook=self)
            elif listener.kind == "leader":
                new = listener.fn(now.run)
            if new is not None:
                act, changed = new, True
        return act, changed

    def _ask(self, listener: Listener, given: Tensor, act: Tensor, now: Pass, view: View) -> tuple[Tensor, bool]:
        """What one function makes of the copy that it is shown, and whether it must take the activation's place."""
        compiling = torch.compiler.is_compiling()
        version, holders = version_of(given), 0 if compiling else getrefcount(given)
        new = now.call_user_function(listener, given, self)
        if new is not None:
            return checked(new, act, listener, self), True
        held = not compiling and getrefcount(given) > holders
        return given, replaces_activation(given, version, act, view, held)

    def _put(self, x: Tensor, act: Tensor, changed: bool, call: Call, now: Pass, view: View) -> Tensor:
        """Writes an activation back, and tells the points that follow this one."""
        if changed:
            x = view.put(x, act, call)
        if self.point.linked and now.run is not None:
            if changed:
                now.run.written[self.name] = act
            else:
                now.run.written.pop(self.name, None)
        return x


def checked_function(hook: HookPoint, fn: HookFunction) -> HookFunction:
    """A function that can be a hook; one that knows which hook points it fits is asked (``fn.check_point(hook)``).

    Raises:
        TypeError: it cannot be called.
        ValueError: it does not fit this hook point.
    """
    if not callable(fn):
        raise TypeError(f"the hook for {hook.name} is {fn!r}, which cannot be called")
    check: Callable[[HookPoint], None] | None = getattr(fn, "check_point", None)
    if check is not None:
        check(hook)
    return fn
