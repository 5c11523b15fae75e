"""`HookPoint`: a named place in a model where functions can read and change an activation.

What comes in is the tensor at a site, as the model made it, and the call of the module that it belongs to. What goes
out is the tensor with which the model goes on: the same object where nobody changed anything, so that a point to
which nobody listens costs nothing and changes no number.

In between, for a point that somebody listens to, in this order (`HookPoint.edited`, which runs and programs share):

1. *Who sees it.* A listener belongs to a scope, or to none, and the present context says which scopes are open
   (`bridge.hooks.context`). Those that the present code does not see are passed over.
2. *See.* The point's view makes the activation of the tensor (`View.get`): heads apart, a part of a fused projection.
   Whoever only looks, such as a cache, is given that, outside of the graph, and that is all (`_read`).
3. *Ask.* Each function is given a copy of its own, so that nothing which somebody holds can change under it, and runs
   outside of the pass: what it computes is not the model's. What it returns must be able to take the activation's
   place (`checked`); where it returns nothing, the copy takes it if it was written to, or if somebody can ask for its
   gradient (`replaces_activation`).
4. *Write back*, where anything changed: `View.put`. Points that follow this one learn what was written
   (`LeaderEdit`).
5. *Gradients* are asked of the very tensor that the model goes on with, so that what a backward hook sees is the
   slope of an edit there (`listen_backward`).

Which of the three ways is taken (only looking, editing, editing with gradients) is chosen when listeners come and go,
not when the model runs. Listeners are attached by an `AttachesListeners`: that of a model, `Wiring`, also puts the
torch hook behind the point.

Refused: what is no tensor, or of another shape, device or kind of number; a hook in a part of the model that backward
computes again without it. Not known here: torch hooks and modules, where a site is, what processes share, which
family of models it is. A view and a site's tensor are all that a point meets.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from adapters.imports import is_compiling
from adapters.points import LinkedPoint, Point
from adapters.views import Call, Deferred, View
from bridge.hooks.context import (
    CURRENT,
    HookFunction,
    Kind,
    Listener,
    NamedPoint,
    Pass,
    PassMemory,
    Scope,
    SourceSite,
    refuse_older_checkpointing,
    refuse_unknown_recomputation,
    setting,
)
from bridge.hooks.modules import itself
from bridge.hooks.parts import TouchesPart

__all__ = ["HookPoint"]


T = TypeVar("T")


#: Calls what makes something of a gradient, and compares that over processes.
Compared = Callable[[Callable[[], Any], Tensor], Any]


class HookPoint(NamedPoint):
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

    __slots__ = ("_attaches", "_path", "ctx", "listeners", "order", "sources", "view")

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
        return self._handles("fwd")

    @property
    def bwd_hooks(self) -> list[Handle]:
        """The functions of gradients that were added to it, by their handles."""
        return self._handles("bwd")

    def _handles(self, kind: Kind) -> list[Handle]:
        return [Handle(self, listener, self._attaches) for listener in self.listeners if listener.kind == kind]

    # Runs of other threads come by at every moment: no listener of theirs may be missing at any, and what is done with
    # an activation has to fit all listeners that may be met. So that comes first, and goes last.

    def add_listener(self, listener: Listener, prepend: bool = False) -> None:
        """Adds a listener, and chooses what is done with an activation while it is there."""
        self._path = self._path_for((listener, *self.listeners))
        self.listeners = (listener, *self.listeners) if prepend else (*self.listeners, listener)

    def keep_listeners(self, left: Iterable[Listener]) -> None:
        """Takes all listeners away but these."""
        self.listeners = tuple(left)
        self._path = self._path_for(self.listeners)

    @staticmethod
    def _path_for(listeners: tuple[Listener, ...]) -> Callable[[HookPoint, Tensor, Call, bool, View], Tensor]:
        path = HookPoint._read
        for listener in listeners:
            if listener.kind in ("bwd", "edge"):
                return HookPoint._edit_with_gradients
            if listener.kind != "read":
                path = HookPoint._edit
        return path

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
                    listener.fn(Deferred(view, x, call, waits), hook=self)
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
        elif backward and not changed and not (view.identity and view.writes_through):
            # The gradient has to flow through the activation as it is seen: what others read of the tensor elsewhere an
            # edit here would not change. Of two names of one activation, backward comes to the later one first.
            act, changed = x.view_as(x) if view.identity else act, True
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
                given = act if own else copy_to_show(act, shown, self.one_tensor and not kept) if shown else act.clone()
                act, made = self._ask(listener, given, act, now, view)
                changed = changed or made
                if shown:
                    keep_gradients_of_all(given, shown)
                shown.append(given)
            elif listener.kind == "read":
                now.show(listener, act, self)
                kept = True
            elif listener.kind == "follow":
                # One that is shown a part puts it back where it stood: into a copy.
                new = listener.fn(act.clone() if isinstance(listener.fn, TouchesPart) else act, hook=self)
            elif listener.kind == "leader":
                new = listener.fn(now.run)
            if new is not None:
                act, changed = new, True
        return act, changed

    def _ask(self, listener: Listener, given: Tensor, act: Tensor, now: Pass, view: View) -> tuple[Tensor, bool]:
        """What one function makes of the copy that it is shown, and whether it must take the activation's place."""
        compiling = is_compiling()
        version, holders = version_of(given), 0 if compiling else getrefcount(given)
        new = now.call_user_function(listener, given, self)
        if new is not None:
            return checked(new, act, listener, self), True
        held = not compiling and getrefcount(given) > holders
        return given, replaces_activation(given, version, act, view, held)

    def _put(self, x: Tensor, act: Tensor, changed: bool, call: Call, now: Pass, view: View) -> Tensor:
        """Writes an activation back, and tells the points that follow this one."""
        if changed:
            new = view.put(x, act, call)
            # The model may take a view of it, which of an expanded or transposed tensor there is none.
            x = new.contiguous() if x.is_contiguous() else new
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


# ----------------------------------------------------------------------------------------------------------------------
# Attaching: one listener, or all those of a scope, and what takes one back.
# ----------------------------------------------------------------------------------------------------------------------


class AttachesListeners:
    """Attaches listeners to hook points, and detaches them: one by one, or all those of a scope.

    As it is, it serves hook points that belong to no model: calling one is what runs its hooks.

    Attributes:
        changes: how often a hook was added or removed that every run sees.
        lock: held while hooks come and go.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.lock = threading.RLock()

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attaches a listener."""
        point.add_listener(listener, prepend)

    def remove(self, point: HookPoint, gone: Iterable[Listener]) -> None:
        """Removes listeners. Those that are not there are ignored."""
        left = set(gone)
        point.keep_listeners(listener for listener in point.listeners if listener not in left)

    def compared(self, make: Callable[[], T], given: Tensor, point: HookPoint) -> T:
        """What a function makes of a gradient, if processes that share the model make the same of it."""
        return make()

    def attach_members(self, members: Iterable[tuple[HookPoint, Listener]], scope: Scope) -> None:
        """Attaches listeners that belong to a scope."""
        scope.members.extend(members)
        self.attach_scope(scope)

    def attach_scope(self, scope: Scope) -> None:
        """Attaches the hooks of a scope, if they are not attached already."""
        with self.lock:
            scope.users += 1
            if scope.users > 1:
                return
            try:
                for point, listener in scope.members:
                    assert isinstance(point, HookPoint)
                    if listener not in point.listeners:
                        point._attaches.add(point, listener)
            except BaseException:
                self.detach_scope(scope)
                raise

    def detach_scope(self, scope: Scope) -> None:
        """The reverse of `attach_scope`, once nobody needs them any more."""
        with self.lock:
            scope.users -= 1
            if not scope.users:
                gone = defaultdict[NamedPoint, list[Listener]](list)
                for point, listener in scope.members:
                    gone[point].append(listener)
                for point, listeners in gone.items():
                    assert isinstance(point, HookPoint)
                    point._attaches.remove(point, listeners)
                if not scope.recomputed:
                    scope.members.clear()  # each holds the scope: the user's functions would live until a collection


class Handle:
    """Takes back what one `add_hook` added.

    Args:
        hook: the hook point.
        listener: what is there.
        attaches: removes it.

    Attributes:
        hook, listener: likewise.
    """

    def __init__(self, hook: HookPoint, listener: Listener, attaches: AttachesListeners) -> None:
        self.hook, self.listener, self._attaches = hook, listener, attaches

    def remove(self) -> None:
        """Removes it. Doing it twice does nothing."""
        self._attaches.remove(self.hook, (self.listener,))

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


# ----------------------------------------------------------------------------------------------------------------------
# What a function is shown: a copy of its own, at the same place in the graph as the activation.
# ----------------------------------------------------------------------------------------------------------------------


def copy_to_show(act: Tensor, shown: list[Tensor], one_tensor: bool) -> Tensor:
    """What one function is shown of an activation.

    Args:
        act: the activation, as the functions before have left it.
        shown: what they were shown. Nobody has been shown the site's own tensor: its copy is a place of its own.
        one_tensor: show what the one before was shown, where gradients are computed.
    """
    if torch.is_grad_enabled() and not is_compiling():
        if one_tensor and any(act is x for x in shown):
            return act
        if act.requires_grad and not act.is_leaf:
            return copy_at_same_edge(act)
    return act.clone()


def copy_at_same_edge(x: Tensor) -> Tensor:
    """A copy that stands in the graph where the tensor itself does: a gradient that reaches one reaches the other.

    So two functions can hold one activation, as in HookedTransformer, and what one writes into it the other does not
    see. What a node has saved for backward is given back with the edge that it was saved with, whatever the hooks of
    saved tensors make of its values: here a copy.

    Args:
        x: requires a gradient, and is no leaf.
    """
    with saved_tensors_hooks(_copy, itself):
        made = _SavedTensor.apply(x)  # held: before torch 2.13 a node forgets what it saved when its output is gone
    return made.grad_fn.saved_tensors[0]


class _SavedTensor(torch.autograd.Function):
    """A node that keeps a tensor, as others do for backward: what it gives back has the tensor's own edge."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def keep_gradients_of_all(given: Tensor, shown: list[Tensor]) -> None:
    """Goes on filling `grad` of what has asked for it, where another tensor at its place asks: torch fills the last's.

    Args:
        given: what a function has just been shown.
        shown: what those before it were shown.
    """
    if is_compiling() or not given.retains_grad:
        return
    before = [x for x in shown if x.retains_grad and x.grad_fn is given.grad_fn and x is not given]
    if not before:
        return
    held = weakref.ref(before[-1])

    def keep(gradient: Tensor) -> None:
        x = held()
        if x is not None:
            x.grad = gradient.clone() if x.grad is None else x.grad + gradient

    given.register_hook(keep)


# ----------------------------------------------------------------------------------------------------------------------
# What it made of that, and whether it can take the place of the activation.
# ----------------------------------------------------------------------------------------------------------------------


def checked(new: Any, old: Tensor, listener: Listener, point: NamedPoint) -> Tensor:
    """What a user's function returned, if it can take the place of the activation.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape, or is on another device.
        TypeError: it is of whole numbers where the activation is not, or the reverse.
    """
    if isinstance(new, Tensor) and new.shape == old.shape and new.device == old.device and new.dtype == old.dtype:
        return new
    name = getattr(listener.fn, "__name__", None) or repr(listener.fn)
    hook, what = ("hook", "activation") if listener.kind in ("fwd", "follow") else ("backward hook", "gradient")
    said = f"the {hook} {name} at {point.name} returned"
    if not isinstance(new, Tensor):
        raise TypeError(f"{said} {type(new).__name__}; it must return a tensor or None")
    if new.shape != old.shape:
        raise ValueError(f"{said} shape {list(new.shape)}; the {what} has shape {list(old.shape)} ({point.point.axes})")
    if new.device != old.device:
        raise ValueError(f"{said} a tensor on {new.device}; the {what} is on {old.device}")
    if _kind_of_number(new) != _kind_of_number(old):
        raise TypeError(
            f"{said} {new.dtype}; the {what} is {old.dtype}. If that is meant, return .to({old.dtype}) of it"
        )
    return new.to(old.dtype)


def _kind_of_number(x: Tensor) -> str:
    """Between numbers of one kind a conversion loses digits at most."""
    if x.dtype == torch.bool:
        return "truth"
    return "complex" if x.is_complex() else "float" if x.is_floating_point() else "integer"


def changed_in_place(given: Tensor, version: int | None) -> bool:
    """Whether a tensor was written to since it had this version (None: it does not count its versions)."""
    return version is None or given._version != version


def replaces_activation(given: Tensor, version: int | None, act: Tensor, view: View, held: bool) -> bool:
    """Whether a copy of an activation that somebody was shown is to take the activation's place.

    Args:
        given: the copy.
        version: of it, before it was shown.
        act: the activation.
        view: how the hook point sees it.
        held: somebody may still hold the copy.
    """
    if is_compiling() and not view.contextual:
        return True  # compiled code cannot ask for values or versions, and has no hooks of gradients
    if changed_in_place(given, version):
        return True
    if is_compiling():
        return False
    if given.requires_grad and (held or not view.contextual or given.retains_grad or given._backward_hooks):
        # The copy is what later computation uses, so that its gradient is the gradient here. Where writing back
        # would compute something anew, only if somebody can ask for that gradient.
        return True
    if view.identity:
        return True  # as good as the activation, and a change through `.data`, which is not counted, is in it
    return not (view.contextual or (given.is_cpu and torch.equal(given, act)))


def version_of(x: Tensor) -> int | None:
    """How often a tensor was written to; None for one of inference mode, which does not count."""
    # torch.compile knows nothing of inference mode.
    return x._version if is_compiling() or not x.is_inference() else None


# ----------------------------------------------------------------------------------------------------------------------
# The gradient at an activation, for those who asked for it.
# ----------------------------------------------------------------------------------------------------------------------


def wants_gradients(listeners: list[Listener]) -> bool:
    """Whether any of them is shown gradients in this run."""
    return torch.is_grad_enabled() and any(listener.kind in ("bwd", "edge") for listener in listeners)


def listen_backward(listener: Listener, seen: Tensor, point: NamedPoint, compared: Compared) -> None:
    """Shows the gradient of an activation to a listener when there is one.

    Autograd may call it on a thread of its own, where nothing of the caller's context is known: the scopes that are
    open now are those that the function sees.
    """
    if listener.kind == "edge":
        listener.fn(seen, hook=point)
        return
    if not seen.requires_grad:
        return
    context = CURRENT.get().after_the_run()

    def on_gradient(gradient: Tensor) -> Tensor | None:
        given = gradient.clone()  # autograd may hand the same tensor to others
        version = version_of(given)
        with setting(CURRENT, context):
            new = compared(lambda: context.call_user_function(listener, given, point), given)
        if isinstance(new, tuple) and len(new) == 1:  # as torch's own backward hooks may return it
            (new,) = new
        if new is None:
            return given if changed_in_place(given, version) else None
        return checked(new, gradient, listener, point)

    seen.register_hook(on_gradient)


# ----------------------------------------------------------------------------------------------------------------------
# Points that take over what is written at another one: `hook_attn_in` feeds the query, key and value inputs.
# ----------------------------------------------------------------------------------------------------------------------


class LeaderEdit:
    """The listener of a follower: what was written at its leader in a pass; None where nothing was.

    Args:
        leader: the name of the other point.
        follower: how its value is the activation here.
    """

    def __init__(self, leader: str, follower: LinkedPoint) -> None:
        self._leader, self._follower = leader, follower

    def __call__(self, run: PassMemory | None) -> Tensor | None:
        written = None if run is None else run.written.get(self._leader)
        return None if written is None else self._follower.convert(written)
