"""`HookPoint`: a named place in a model where functions can read and change an activation.

Input: the tensor at a site, as the model computed it, and the module's call. Output: the tensor
with which the model continues. It is the same object if nothing was changed, so a hook point
without listeners has no cost and changes no number.

With listeners, these steps follow (`HookPoint.edited`, shared by runs and programs):

1. *Scope.* A listener belongs to a scope, or to none, and the present context holds the open scopes
   (`bridge.hooks.context`). Other listeners are skipped.
2. *View.* The point's view converts the tensor to the activation (`View.get`): it separates heads,
   or selects a part of a fused projection. A read-only listener, such as a cache, is given that,
   outside of the graph (`_read`).
3. *Call.* Each function is given its own copy, so that no tensor that other code holds changes, and
   runs outside of the pass: its computation does not belong to the model. Its result must be able
   to replace the activation (`checked`). If it returns None, the copy replaces the activation if it
   was written to, or if its gradient can be requested (`replaces_activation`).
4. *Write back*, after a change: `View.put`. The points that follow this one are given the written
   value (`LeaderEdit`).
5. *Gradients* are taken at the tensor with which the model continues, so a backward hook sees the
   derivative with respect to an edit here (`listen_backward`). Where a forward pre-hook of the
   user's stands before the point and keeps the values, it is a part of the model: the gradient is
   that of the model's own tensor, which is zero if the pre-hook stops it.

The path (reading, editing, or editing with gradients) is chosen when listeners are added or
removed, not when the model runs. An `AttachesListeners` attaches listeners: that of a model,
`Wiring`, also attaches the torch hook.

Errors: results that are not tensors, or differ in shape, device or kind of dtype; hooks in a part
of the model that backward recomputes without them. This file does not depend on torch hooks,
modules, the location of sites, processes or model families: a hook point only knows its view and
the tensor at its site.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from sys import getrefcount
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from adapters.imports import is_compiling
from adapters.points import LinkedPoint, Point
from adapters.views import Call, Deferred, View
from adapters.views.values import is_readable, same_bits
from adapters.views.views import NO_CALL
from bridge.hooks.context import (
    CURRENT,
    ForwardPass,
    HookFunction,
    Kind,
    Listener,
    NamedPoint,
    Pass,
    PassMemory,
    RunContext,
    Scope,
    SourceSite,
    setting,
)
from bridge.hooks.parts import TouchesPart
from bridge.hooks.recomputation import refuse_older_checkpointing, refuse_unknown_recomputation
from bridge.modules import Finder, itself

__all__ = ["HookPoint"]


T = TypeVar("T")


class HookPoint(NamedPoint):
    """A place where an activation can be read and changed.

    Attributes:
        name: the canonical name, such as ``blocks.3.attn.hook_z``.
        ctx: a dictionary for the user's hook functions to keep state in.
        point: the adapter's declaration: its axes, aliases, site and view.
        one_tensor: if gradients are computed, pass the same tensor to all functions, as
            HookedTransformer does: an earlier function that keeps it sees later writes and calls of
            `retain_grad`. Cached tensors do not change.
    """

    one_tensor: ClassVar[bool] = False

    __slots__ = ("_attaches", "_path", "ctx", "listeners", "order", "sources", "view", "weights")

    def __init__(self, point: Point, order: int, attaches: AttachesListeners) -> None:
        self.name = point.name
        self.point = point
        self.view = point.view
        self.order = order
        self.ctx: dict[Any, Any] = {}
        self.listeners: tuple[Listener, ...] = ()
        #: The torch hooks at the sites whose tensors the view needs.
        self.sources: tuple[SourceSite, ...] = ()
        #: Finds the module whose weights its activation is computed with; None outside of a model.
        self.weights: Finder | None = None
        self._attaches = attaches
        self._path: Callable[[HookPoint, Tensor, Call, bool, View], Tensor] = HookPoint._read

    def __repr__(self) -> str:
        hooks = f", {len(self.listeners)} hooks" if self.listeners else ""
        return f"HookPoint({self.name}: [{self.point.axes}]{hooks})"

    @property
    def fwd_hooks(self) -> list[Handle]:
        """Return the forward hook functions of this hook point, by their handles."""
        return self._handles("fwd")

    @property
    def bwd_hooks(self) -> list[Handle]:
        """Return the backward hook functions of this hook point, by their handles."""
        return self._handles("bwd")

    def _handles(self, kind: Kind) -> list[Handle]:
        return [
            Handle(self, listener, self._attaches)
            for listener in self.listeners
            if listener.kind == kind
        ]

    # Other threads may run concurrently, so a listener must never be missing, not even briefly. The
    # path must handle every listener that a thread may meet: switch it before adding one, and after
    # removing one.

    def add_listener(self, listener: Listener, prepend: bool = False) -> None:
        """Add a listener, and choose how the hook point handles activations while it is
        attached.
        """
        self._path = self._path_for((listener, *self.listeners))
        self.listeners = (listener, *self.listeners) if prepend else (*self.listeners, listener)

    def keep_listeners(self, kept: Iterable[Listener]) -> None:
        """Remove all listeners but the given ones."""
        self.listeners = tuple(kept)
        self._path = self._path_for(self.listeners)

    @staticmethod
    def _path_for(
        listeners: tuple[Listener, ...],
    ) -> Callable[[HookPoint, Tensor, Call, bool, View], Tensor]:
        kinds = {listener.kind for listener in listeners}
        if "rule" in kinds:
            return HookPoint._edit_with_rules
        if kinds & {"bwd", "edge"}:
            return HookPoint._edit_with_gradients
        return HookPoint._edit if kinds - {"read"} else HookPoint._read

    def layer(self) -> int:
        """Return the index of the block that the hook point belongs to.

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
        """Add a function that reads, and may change, the activation in every run of every thread.

        Args:
            hook: called as ``hook(activation, hook=point)`` with the activation (or, with
                ``dir="bwd"``, its gradient). It may return a new tensor of the same shape, or
                change the given one in place, or neither.
            dir: ``"fwd"`` or ``"bwd"``.
            is_permanent: only `reset_hooks` with ``including_permanent=True`` removes it.
            level: a number by which `reset_hooks` can remove only these hooks.
            prepend: run it before functions that were added earlier.

        Returns:
            A handle with `remove()`.

        Raises:
            ValueError: `dir` is neither ``"fwd"`` nor ``"bwd"``, or the function does not fit the
                activation.
            TypeError: `hook` cannot be called.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> handle = bridge.blocks[0].hook_mlp_out.add_hook(
            ...     lambda activation, hook: activation * 0
            ... )
            >>> handle.remove()
        """
        if dir not in ("fwd", "bwd"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd" or "bwd"')
        listener = Listener(
            cast(Kind, dir), checked_function(self, hook), None, is_permanent, level
        )
        self._attaches.add(self, listener, prepend)
        return Handle(self, listener, self._attaches)

    def add_perma_hook(self, hook: HookFunction, dir: str = "fwd") -> Handle:
        """Add a hook that `reset_hooks` keeps by default.

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
        """Remove the added hooks, and those of a running ``with`` statement or cache.

        Args:
            dir: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: also remove permanent hooks.
            level: remove only hooks that were added at this level.

        Raises:
            ValueError: `dir` is not one of these.
        """
        if dir not in ("fwd", "bwd", "both"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd", "bwd" or "both"')
        kinds = ("fwd", "bwd") if dir == "both" else (dir,)
        gone = [
            listener
            for listener in self.listeners
            if listener.scope is None
            and listener.kind in kinds
            and (including_permanent or not listener.permanent)
            and (level is None or listener.level == level)
        ]
        self._attaches.remove(self, gone)

    def clear_context(self) -> None:
        """Clear `ctx`."""
        self.ctx = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Run the hooks on a tensor as if the model had computed it here, and return the result."""
        return self._path(self, x, Call(nn.Identity(), (x,), {}), False, View())

    def apply(self, x: Tensor, call: Call, copy: bool = False) -> Tensor:
        """Show the tensor at the site to the listeners that are visible to the current code.

        Args:
            x: the tensor.
            call: the module call that it belongs to.
            copy: whether the tensor will be written to afterwards, so that listeners must keep a
                copy.

        Returns:
            The tensor with which the model continues: `x` itself if nothing was changed.
        """
        return self._path(self, x, call, copy, self.view)

    def is_attached_by(self, attaches: AttachesListeners) -> bool:
        """Tell whether this registry attaches the listeners of this hook point."""
        return self._attaches is attaches

    @property
    def has_visible_listeners(self) -> bool:
        """Tell whether any of its listeners is visible to the current code."""
        visible = CURRENT.get().visible
        return any(listener.scope in visible for listener in self.listeners)

    def visible_listeners(self) -> list[Listener]:
        """Return the listeners that are visible to the current code."""
        visible = CURRENT.get().visible
        return [listener for listener in self.listeners if listener.scope in visible]

    def sources_seen(self) -> tuple[tuple[nn.Module, Tensor], ...]:
        """Return the tensors of the current pass that the view needs (see `sources_in`)."""
        return self.sources_in(CURRENT.get().run)

    def sources_in(self, run: PassMemory | None) -> tuple[tuple[nn.Module, Tensor], ...]:
        """Return the tensors at the sites that the view needs, with the modules called there.

        Args:
            run: the memory of the pass.

        Raises:
            RuntimeError: the pass has not reached these sites.
        """
        passed = [] if run is None else [run.tensor_at(source) for source in self.sources]
        sources = [source for source in passed if source is not None]
        if len(sources) < len(self.sources):
            where = ", ".join(source.site.path for source in self.sources)
            raise RuntimeError(
                f"{self.name} is seen with the help of what passes {where}, which did not run"
                " before it: call the whole model, not a part of it"
            )
        return tuple(sources)

    # One of the following four methods is `_path`, chosen when listeners are added or removed.

    def _read(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Show the activation to read-only listeners. This is a hot path when a run caches
        everything.
        """
        visible = CURRENT.get().visible
        for listener in self.listeners:
            if listener.scope in visible and listener.kind == "read":
                waits = listener.deferrable and not (
                    copy or torch.is_grad_enabled() or x.is_inference()
                )
                if view.deferrable and (waits or (listener.partial and view.by_row)):
                    listener.fn(Deferred(view, x, call, waits), hook=self)
                    continue
                if view.identity:
                    act = x
                elif torch.is_grad_enabled():
                    with torch.no_grad():  # read-only activations stay out of the graph
                        act = view.get(x, call)
                else:
                    act = view.get(x, call)
                listener.fn(act.clone() if copy else act, hook=self)
        return x

    def _edit(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Let the user's functions read the activation and change it."""
        context = CURRENT.get()
        mine = [listener for listener in self.listeners if listener.scope in context.visible]
        for listener in mine:
            if listener.kind not in ("read", "rule"):
                break
        else:
            return self._read(x, call, copy, view) if mine else x
        self._refuse_lost_hooks(context.run)
        return self.edited(x, call, context, mine, copy, view)

    def _refuse_lost_hooks(self, run: ForwardPass | None) -> None:
        """Raise an error if backward would compute this activation again without its hooks.

        Raises:
            RuntimeError: it would.
        """
        is_block_alone = run is None and self._attaches.of_model
        if is_block_alone or (run is not None and run.gradients):
            refuse_unknown_recomputation(self.name)

    def _edit_with_gradients(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Edit as `_edit` does, and show the gradient with respect to the activation that later
        computation uses.
        """
        context = CURRENT.get()
        mine = self.visible_listeners()
        if not wants_gradients(mine):
            return self._edit(x, call, copy, view)
        seen = self._seen(x, call, copy, view)
        act, changed = self._call_listeners(mine, seen, context, view)
        self._refuse_lost_hooks(context.run)
        backward: list[Listener] = []
        if act.is_floating_point():
            backward = [listener for listener in mine if listener.kind in ("bwd", "edge")]
        if backward:
            refuse_older_checkpointing()
        front = self._before_others(x, context)
        if changed and not is_copy(act, seen):
            front = None
        if backward and front is None:
            act, changed = self._in_graph(x, act, changed, view)
        x = self._put(x, act, changed, call, context, view)
        shown = front if front is not None else x if view.identity else act
        for listener in backward:
            listen_backward(listener, shown, self, self._attaches)
        return x

    def _edit_with_rules(self, x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Edit as `_edit_with_gradients` does, and apply gradient rules: next to the function that
        they are about, whatever the other listeners do.
        """
        listeners = self.visible_listeners() if torch.is_grad_enabled() else ()
        rules = [x.fn for x in listeners if isinstance(x.fn, GradientRule)]
        if rules:
            self._refuse_lost_hooks(CURRENT.get().run)
        for rule in rules:
            rule.prepare(call)
            x = rule.applied(x, call, self) if rule.first else x
        x = self._edit_with_gradients(x, call, copy, view)
        for rule in rules:
            x = x if rule.first else rule.applied(x, call, self)
        return x

    @staticmethod
    def _in_graph(x: Tensor, act: Tensor, changed: bool, view: View) -> tuple[Tensor, bool]:
        """Return an activation whose gradient is that of an edit, and whether to write it back."""
        if not act.requires_grad:
            # Nothing before this point requires a gradient (frozen weights): the graph starts here.
            return act.detach().clone().requires_grad_(), True
        if changed or (view.identity and view.writes_through):
            return act, changed
        # The gradient must flow through the activation as shown: an edit here does not affect other
        # readers of the tensor. Of two names of one activation, backward reaches the later one
        # first.
        return x.view_as(x) if view.identity else act, True

    def _before_others(self, x: Tensor, context: RunContext) -> Tensor | None:
        """Return the activation before the forward pre-hooks of others, if they left its values as
        they are.
        """
        run = context.run
        behind, front = (None, None) if run is None else run.fronts.pop(self.name, (None, None))
        return front if behind is x else None

    def in_front(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the activation whose gradient is asked for, and the site's tensor made of it."""
        view = self.view
        act, _ = self._in_graph(x, self._seen(x, NO_CALL, False, view), False, view)
        return act, view.put(x, act, NO_CALL)

    # The action of a hook at a site, in a run and in a program; only the pass differs.

    def edited(
        self, x: Tensor, call: Call, now: Pass, mine: Sequence[Listener], copy: bool, view: View
    ) -> Tensor:
        """Return the listeners' result for the tensor at the site.

        Args:
            x: the tensor.
            call: the module call that it belongs to.
            now: the pass.
            mine: the listeners, in turn.
            copy: whether the tensor will be written to afterwards.
            view: how the activation is seen.
        """
        own = call.private and len(mine) == 1 and view.identity and not torch.is_grad_enabled()
        act, changed = self._call_listeners(mine, self._seen(x, call, copy, view), now, view, own)
        return self._put(x, act, changed, call, now, view)

    @staticmethod
    def _seen(x: Tensor, call: Call, copy: bool, view: View) -> Tensor:
        """Return the activation, as a copy if the site's tensor is about to be written to."""
        act = x if view.identity else view.get(x, call)
        if act.is_sparse:
            return act.to_dense()
        return act.clone() if copy or view.writes_through else act

    def _call_listeners(
        self, mine: Sequence[Listener], act: Tensor, now: Pass, view: View, own: bool = False
    ) -> tuple[Tensor, bool]:
        """Call the listeners in turn on the activation; return the result, and whether it changed.

        Each function gets its own copy, so that tensors held by other code do not change. The next
        function gets a copy of the previous result, so that gradients flow through each. An
        activation that is the hook point's `own` needs no copy.
        """
        shown: list[Tensor] = []
        changed = kept = False
        for listener in mine:
            new: Tensor | None = None
            if listener.kind == "fwd":
                if own:
                    argument = act
                elif shown:
                    argument = copy_to_show(act, shown, self.one_tensor and not kept)
                else:
                    argument = act.clone()
                act, replaced = self._call_function(listener, argument, act, now, view)
                changed = changed or replaced
                if shown:
                    keep_gradients_of_all(argument, shown)
                shown.append(argument)
            elif listener.kind == "read":
                now.show(listener, act, self)
                kept = True
            elif listener.kind == "follow":
                # A listener to a part writes its result back, into a copy.
                copied = act.clone() if isinstance(listener.fn, TouchesPart) else act
                new = listener.fn(copied, hook=self)
            elif listener.kind == "leader":
                new = listener.fn(now.run)
            if new is not None:
                act, changed = new, True
        return act, changed

    def _call_function(
        self, listener: Listener, argument: Tensor, act: Tensor, now: Pass, view: View
    ) -> tuple[Tensor, bool]:
        """Call one function on its copy of the activation; return the result, and whether to use
        it.
        """
        listener.called = True
        compiling = is_compiling()
        version = version_of(argument)
        holders = 0 if compiling else getrefcount(argument)
        new = now.call_user_function(listener, argument, self)
        if new is not None:
            return checked(new, act, listener, self), True
        held = not compiling and getrefcount(argument) > holders
        return argument, replaces_activation(argument, version, act, view, held)

    def _put(
        self, x: Tensor, act: Tensor, changed: bool, call: Call, now: Pass, view: View
    ) -> Tensor:
        """Write an activation back, and record it for the hook points linked to this one."""
        if changed:
            new = view.put(x, act, call)
            # The model may call `view` on it, which fails on an expanded or transposed tensor.
            x = new.contiguous() if x.is_contiguous() else new
        if self.point.linked and now.run is not None:
            if changed:
                now.run.written[self.name] = act
            else:
                now.run.written.pop(self.name, None)
        return x


def checked_function(hook: HookPoint, fn: HookFunction) -> HookFunction:
    """Check that a function can be a hook; if it has a `check_point` method, let it check the hook
    point.

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


# --------------------------------------------------------------------------------------------------
# Attaching and detaching one listener, or all listeners of a scope.
# --------------------------------------------------------------------------------------------------


class AttachesListeners:
    """A registry that attaches listeners to hook points and detaches them, singly or by scope.

    This class is used for hook points that belong to no model: calling such a point runs its hooks.

    Attributes:
        changes: how often hooks that every run sees were added or removed.
        lock: held while hooks are added or removed.
        of_model: whether its hook points belong to a model and show what its modules compute.
    """

    of_model = False

    def __init__(self) -> None:
        self.changes = 0
        self.lock = threading.RLock()

    def add(self, point: HookPoint, listener: Listener, prepend: bool = False) -> None:
        """Attach a listener."""
        point.add_listener(listener, prepend)

    def remove(self, point: HookPoint, gone: Iterable[Listener]) -> None:
        """Remove listeners. Listeners that are not attached are ignored."""
        removed = set(gone)
        point.keep_listeners(listener for listener in point.listeners if listener not in removed)

    def attached_scopes(self) -> set[Scope | None]:
        """Return the scopes that listeners belong to; None represents added hooks."""
        return set()

    def compared(self, make: Callable[[], T], gradient: Tensor, point: HookPoint) -> T:
        """Call a function on a gradient; check that processes that share the model agree on the
        result.
        """
        return make()

    def attach_members(self, members: Iterable[tuple[HookPoint, Listener]], scope: Scope) -> None:
        """Attach listeners that belong to a scope."""
        scope.members.extend(members)
        self.attach_scope(scope)

    def attach_scope(self, scope: Scope) -> None:
        """Attach the hooks of a scope, unless they are attached already."""
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

    @contextmanager
    def scopes_attached(self, scopes: Iterable[Scope | None]) -> Iterator[None]:
        """Keep scopes attached inside a ``with`` statement, even if their own ``with`` statement
        ends first.

        Args:
            scopes: the currently open scopes; None represents added hooks.
        """
        with ExitStack() as attached:
            for scope in scopes:
                if scope is not None:
                    self.attach_scope(scope)
                    attached.callback(self.detach_scope, scope)
            yield

    def detach_scope(self, scope: Scope) -> None:
        """Detach the hooks of a scope, once it has no users."""
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
                    # Each holds the scope: a reference cycle would keep the user's functions alive
                    # until a collection.
                    scope.members.clear()


class Handle:
    """A handle that removes the hook of one `add_hook`.

    Args:
        hook: the hook point.
        listener: the attached listener.
        attaches: the registry that removes it.

    Attributes:
        hook, listener: the arguments.
    """

    def __init__(self, hook: HookPoint, listener: Listener, attaches: AttachesListeners) -> None:
        self.hook = hook
        self.listener = listener
        self._attaches = attaches

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        self._attaches.remove(self.hook, (self.listener,))

    @property
    def id(self) -> int:
        """Return a number that is unique among attached hooks."""
        return id(self.listener)

    @property
    def function(self) -> HookFunction:
        """Return the user's function."""
        return self.listener.fn

    @property
    def is_permanent(self) -> bool:
        """Tell whether only `reset_hooks` with ``including_permanent=True`` removes it."""
        return self.listener.permanent

    @property
    def context_level(self) -> int | None:
        """Return the level at which the hook was added."""
        return self.listener.level

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.listener is other.listener

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


# --------------------------------------------------------------------------------------------------
# The argument of a user function: its own copy, at the same place in the graph as the activation.
# --------------------------------------------------------------------------------------------------


def copy_to_show(act: Tensor, shown: list[Tensor], one_tensor: bool) -> Tensor:
    """Return the copy of an activation to pass to one function.

    Args:
        act: the activation, as the functions before have left it.
        shown: the copies shown to earlier functions. The site's own tensor is never shown, only its
            copy.
        one_tensor: show the previous function's tensor, if gradients are computed.
    """
    if torch.is_grad_enabled() and not is_compiling():
        if one_tensor and any(act is x for x in shown):
            return act
        if act.requires_grad and not act.is_leaf:
            return copy_at_same_edge(act)
    return act.clone()


def copy_at_same_edge(x: Tensor) -> Tensor:
    """Copy a tensor such that both share one edge of the autograd graph, and therefore the
    gradient.

    Two functions can then hold the same activation, as in HookedTransformer, without seeing each
    other's writes. Autograd returns a saved tensor with its original edge, even if saved-tensor
    hooks replace its values; here such hooks copy it.

    Args:
        x: a tensor that requires a gradient and is not a leaf.
    """
    with saved_tensors_hooks(_copy, itself):
        # Held: before torch 2.13 a node drops its saved tensors when its output is freed.
        output = _SavedTensor.apply(x)
    return output.grad_fn.saved_tensors[0]


class _SavedTensor(torch.autograd.Function):
    """An autograd node that saves a tensor; the tensor that it returns has the original's edge."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def keep_gradients_of_all(last: Tensor, shown: list[Tensor]) -> None:
    """Keep filling `grad` of tensors that called `retain_grad`, although torch fills only the last.

    Args:
        last: the tensor that a function was just shown.
        shown: the tensors that earlier functions were shown.
    """
    if is_compiling() or not last.retains_grad:
        return
    before = [x for x in shown if x.retains_grad and x.grad_fn is last.grad_fn and x is not last]
    if not before:
        return
    held = weakref.ref(before[-1])

    def keep(gradient: Tensor) -> None:
        x = held()
        if x is not None:
            x.grad = gradient.clone() if x.grad is None else x.grad + gradient

    last.register_hook(keep)


# --------------------------------------------------------------------------------------------------
# The result of a user function, and whether it can replace the activation.
# --------------------------------------------------------------------------------------------------


def checked(new: Any, old: Tensor, listener: Listener, point: NamedPoint) -> Tensor:
    """Check that a user function's result can replace the activation, and return it.

    Raises:
        TypeError: it is not a tensor.
        ValueError: its shape or device differs.
        TypeError: it has an integer dtype and the activation does not, or the reverse.
    """
    if (
        isinstance(new, Tensor)
        and new.shape == old.shape
        and new.device == old.device
        and new.dtype == old.dtype
    ):
        return new
    name = getattr(listener.fn, "__name__", None) or repr(listener.fn)
    is_forward = listener.kind in ("fwd", "follow")
    what = "activation" if is_forward else "gradient"
    returned = f"the {'hook' if is_forward else 'backward hook'} {name} at {point.name} returned"
    if not isinstance(new, Tensor):
        raise TypeError(f"{returned} {type(new).__name__}; it must return a tensor or None")
    if new.shape != old.shape:
        raise ValueError(
            f"{returned} shape {list(new.shape)}; the {what} has shape {list(old.shape)}"
            f" ({point.point.axes})"
        )
    if new.device != old.device:
        raise ValueError(f"{returned} a tensor on {new.device}; the {what} is on {old.device}")
    if _kind_of_number(new) != _kind_of_number(old):
        raise TypeError(
            f"{returned} {new.dtype}; the {what} is {old.dtype}. If that is meant, return"
            f" .to({old.dtype}) of it"
        )
    return new.to(old.dtype)


def _kind_of_number(x: Tensor) -> str:
    """Return the kind of a dtype; a conversion within a kind loses only precision."""
    if x.dtype == torch.bool:
        return "truth"
    return "complex" if x.is_complex() else "float" if x.is_floating_point() else "integer"


def is_copy(new: Tensor, old: Tensor) -> bool:
    """Tell whether a tensor is an unchanged copy of another one, also for autograd."""
    node = new.grad_fn
    if node is not None and node.name() == "CloneBackward0":
        node = node.next_functions[0][0]
    return node is old.grad_fn and new.requires_grad == old.requires_grad and same_bits(new, old)


def keeps_values(new: Tensor, old: Tensor) -> bool:
    """Tell whether a tensor has the values of another one, and is computed from it or detached.

    Args:
        new: the tensor. It does not if it is a leaf that a new graph begins with.
        old: the other one, which is no leaf.
    """
    if new.shape != old.shape or new.dtype != old.dtype or not same_bits(new, old):
        return False
    if not new.requires_grad:
        return True
    start: Any = old.grad_fn
    nodes: list[Any] = [new.grad_fn]
    visited: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is start:
            return True
        if node is None or node in visited or node._sequence_nr() <= start._sequence_nr():
            continue  # the last: it was made before
        visited.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def changed_in_place(x: Tensor, version: int | None) -> bool:
    """Tell whether a tensor was written to since it had this version (None: unknown, because
    versions are not counted).
    """
    return version is None or x._version != version


def replaces_activation(
    copy: Tensor, version: int | None, act: Tensor, view: View, held: bool
) -> bool:
    """Tell whether the copy passed to a function should replace the activation.

    Args:
        copy: the copy.
        version: its version before it was shown.
        act: the activation.
        view: the hook point's view.
        held: whether other code may still hold the copy.
    """
    if is_compiling() and not view.contextual:
        return True  # compiled code cannot read values or versions, and has no gradient hooks
    if changed_in_place(copy, version):
        return True
    if is_compiling():
        return False
    if copy.requires_grad and (
        held or not view.contextual or copy.retains_grad or copy._backward_hooks
    ):
        # Later computation uses the copy, so that its gradient is the gradient here. If writing
        # back would recompute something, do so only if that gradient can be requested.
        return True
    if view.identity:
        # It equals the activation, and includes changes through `.data`, which are not counted.
        return True
    if not is_readable(copy) or not (copy.is_cpu or view.contextual):
        return not view.contextual  # writing back takes less time than waiting for a comparison
    return not same_bits(copy, act)


def version_of(x: Tensor) -> int | None:
    """Return a tensor's version counter; None in inference mode, which does not count."""
    # torch.compile does not support inference mode
    return x._version if is_compiling() or not x.is_inference() else None


# --------------------------------------------------------------------------------------------------
# The gradient at an activation, for listeners that request it.
# --------------------------------------------------------------------------------------------------


def wants_gradients(listeners: list[Listener]) -> bool:
    """Tell whether any listener is shown gradients in this run."""
    return torch.is_grad_enabled() and any(
        listener.kind in ("bwd", "edge") for listener in listeners
    )


def listen_backward(
    listener: Listener, act: Tensor, point: HookPoint, attaches: AttachesListeners
) -> None:
    """Show the gradient of an activation to a listener when backward computes it. Autograd may call
    the listener on a separate thread without the caller's context, so it is called with the scopes
    that are open now.
    """
    if listener.kind == "edge":
        listener.fn(act, hook=point)
        return
    if not act.requires_grad:
        return
    context = CURRENT.get().after_the_run()
    of_zeros = act.shape, act.dtype, act.device

    def on_gradient(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # what comes later gives none: a layer that stops it
            shape, dtype, device = of_zeros
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        copy = gradient.clone()  # autograd may hand the same tensor to others
        version = version_of(copy)
        with setting(CURRENT, context):
            call = lambda: context.call_user_function(listener, copy, point)
            new = attaches.compared(call, copy, point)
        if isinstance(new, tuple) and len(new) == 1:  # as torch's own backward hooks may return it
            (new,) = new
        if new is None:
            return written_gradient(copy, version, gradient)
        return checked(new, gradient, listener, point)

    act.register_hook(on_gradient)


def written_gradient(copy: Tensor, version: int | None, gradient: Tensor) -> Tensor | None:
    """Return a function's copy of a gradient if it wrote to it; otherwise None."""
    if changed_in_place(copy, version):
        return copy
    if not is_readable(copy):
        return None
    if copy.is_cpu:
        return None if same_bits(copy, gradient) else copy
    return copy.clone()  # takes less time than waiting for a comparison


# --------------------------------------------------------------------------------------------------
# Gradient rules: another gradient of an activation, with the same value.
# --------------------------------------------------------------------------------------------------


class GradientRule:
    """A rule that gives an activation the gradient of another tensor.

    Attributes:
        first: whether it comes before the other listeners, as at the output of a function; after
            them otherwise.
        holds: whether the activation has no gradient.
    """

    first: bool = False
    holds: bool = False

    def prepare(self, call: Call) -> None:
        """Prepare the call that the hook point's view reads."""

    def __call__(self, act: Tensor, run: PassMemory) -> Tensor:
        """Return the tensor whose gradient replaces the activation's; itself: none does.

        Args:
            act: the activation.
            run: the memory of the pass.
        """
        return act

    def applied(self, x: Tensor, call: Call, point: HookPoint) -> Tensor:
        """Return the tensor at the hook point's site, with the other gradient."""
        act = x if point.view.identity else point.view.get(x, call)
        run = CURRENT.get().run
        assert run is not None
        surrogate = self(act, run)
        if surrogate is act:
            return x
        return with_gradient_of(x, point.view.put(x, surrogate, call))


def with_gradient_of(x: Tensor, surrogate: Tensor) -> Tensor:
    """Return a tensor of the values of one and the gradient of another tensor."""
    values = x.detach()
    return _ValuesOf.apply(values, surrogate) if surrogate.requires_grad else values


class _ValuesOf(torch.autograd.Function):
    """An autograd node with the values of its first argument and the gradient of its second."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, surrogate: Tensor) -> Tensor:
        return x.clone()  # the model may write to it

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


# --------------------------------------------------------------------------------------------------
# Points that take over the value written at another one: `hook_attn_in` feeds the query, key and
# value inputs.
# --------------------------------------------------------------------------------------------------


class LeaderEdit:
    """The listener at a linked point (follower): it returns the value written in this pass at the
    point that it follows (leader), or None.

    Args:
        leader: the name of the leader.
        follower: the link, which converts the leader's value to the activation here.
    """

    def __init__(self, leader: str, follower: LinkedPoint) -> None:
        self._leader, self._follower = leader, follower

    def __call__(self, run: PassMemory | None) -> Tensor | None:
        written = None if run is None else run.written.get(self._leader)
        return None if written is None else self._follower.convert(written)
