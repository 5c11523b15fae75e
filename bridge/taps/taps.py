"""`Tap`: a wrapper around one module's forward, installed while listeners are attached inside it.

Most hook points are a module's input or output. Attention scores, an expert's neurons and the
states of a recurrence are not: they exist only while a forward runs. A tap runs that forward, the
model's own, and watches the torch functions that it calls. It recomputes only what a listener
changes.

Input: the arguments of the module's call. Output: what the module returns. Between the two:

1. *Check for listeners.* A tap looks up the visible listeners on its channels
   (`Tap.active_points`). Without any, it calls the original forward directly.
2. *Watch.* A `CallWatch` (a torch function mode) is active while the forward runs, or, if
   transformers looks the kernel up by name, while that kernel runs (`PatchedFunction`,
   `INSTEAD`). It recognises values by the function and its arguments: a softmax, a product
   of queries and keys, a kernel, an expert's matrix.
3. *Show.* A recognised value is shown on a channel (`TappedCall.show`): each hook point there sees
   it as it would a module's output, and the function continues with the result.
4. *Check.* At the end, a watch raises an error for listeners that were shown nothing, with the
   reason and the remedy.

A watch handles one call of the module, a `TappedCall`: `RunCall` in a run; programs have another
one, so that the recognition is written once for both. The kinds of taps are in `attention`,
`experts` and `recurrence`; `Wiring` installs and removes them.

This file does not depend on model families, names of hook points, or torch hooks. `SharedTensor`
handles tensors that processes share.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from adapters.observe.observe import Function, Watch
from adapters.points import call_number
from adapters.views import Args, Call, Kwargs
from bridge.hooks.context import CURRENT, ForwardPass, Scope
from bridge.hooks.hooks import HookPoint
from bridge.modules import InForwardsPlace
from bridge.sharing import SharedTensor


class Tap(InForwardsPlace):
    """A wrapper of one module's forward, for the hook points inside it.

    The hook points are stored by channel: the `key` of a site.

    Args:
        module: the module.
        watch: the class of the watch on one call of the module; None: `watched` chooses it.

    Attributes:
        module, watch: the arguments.
        points: the hook points, by channel.
        opened: the scopes whose listeners may be added while the module runs.
        original: the forward that it wraps.
        shared: how the shown tensors are sharded over processes, by channel; empty if they are not.
        own: the previous entry of the module's dictionary; None if the class's forward was used.
    """

    def __init__(self, module: nn.Module, watch: type[CallWatch] | None = None) -> None:
        self.module, self.watch = module, watch
        self.points: dict[str, tuple[HookPoint, ...]] = {}
        self.opened: tuple[Scope, ...] = ()
        self.shared: dict[str, SharedTensor] = {}
        #: Functions that undo the tap's other patches, for as long as it is installed.
        self._undo: list[Callable[[], object]] = []

    def connect(self, channel: str, point: HookPoint) -> None:
        """Add a hook point; the first one installs the tap."""
        if not (self.points or self.opened):
            self._install()
        self.points[channel] = (*self.points.get(channel, ()), point)

    def disconnect(self, channel: str, point: HookPoint) -> None:
        """Remove a hook point; the last one removes the tap."""
        others = tuple([p for p in self.points[channel] if p is not point])
        if others:
            self.points[channel] = others
            return
        del self.points[channel]
        if not (self.points or self.opened):
            self._uninstall()

    def open(self, scope: Scope) -> None:
        """Watch the module for a scope whose listeners may be added while it runs."""
        if not (self.points or self.opened):
            self._install()
        self.opened = (*self.opened, scope)

    def close(self, scope: Scope) -> None:
        """Undo `open`."""
        if scope not in self.opened:
            return
        self.opened = tuple([other for other in self.opened if other is not scope])
        if not (self.points or self.opened):
            self._uninstall()

    def _install(self) -> None:
        """Install the tap on the module's forward, for its first user."""
        self.own: Function | None = self.module.__dict__.get("forward")
        self.original: Function = self.module.forward
        if self.watch is not None:
            self._undo += [
                PatchedFunction.install(namespace, name, self)
                for namespace, name in self.watch.functions(self.module)
            ]
        if isinstance(self.module, nn.MultiheadAttention):
            # torch's encoder layer skips its submodules if none has hooks.
            self._undo.append(self.module.register_forward_hook(noop_hook).remove)
        # Bypass `nn.Module.__setattr__`, which searches every value for parameters.
        self.module.__dict__["forward"] = self

    def _uninstall(self) -> None:
        """Remove the tap after its last user."""
        forward = self.module.__dict__.get("forward")
        while forward is not self and isinstance(forward, Tap) and forward.own is not self:
            forward = forward.own
        if forward is not self and isinstance(forward, Tap):  # another tap wraps this one
            forward.own, forward.original = self.own, self.original
        elif self.own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.own
        self._undo_patches()

    def _undo_patches(self) -> None:
        while self._undo:
            self._undo.pop()()

    def active_points(self, channels: Sequence[str]) -> list[HookPoint]:
        """Return the hook points on these channels with listeners that are visible to the current
        code."""
        context = CURRENT.get()
        visible = context.visible
        start = None if context.run is None else context.run.start_at
        active = []
        for channel in channels:
            for point in self.points.get(channel, ()):
                if start is not None and point.point.depth < start:
                    continue
                for listener in point.listeners:
                    if listener.scope in visible:
                        if "@" not in point.point.site.path or self.is_under_way(point):
                            active.append(point)
                        break
        return active

    def is_under_way(self, point: HookPoint) -> bool:
        """Tell whether the current call of the module is the one to which a hook point refers."""
        run, number = CURRENT.get().run, call_number(point.point.site.path)
        return run is not None and number is not None and run.is_call(self.module, number)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the module's forward while the tap is installed."""
        visible = CURRENT.get().visible if self.opened else ()
        if self.active_points(tuple(self.points)) or any(scope in visible for scope in self.opened):
            return self.watched(*args, **kwargs)
        return self.original(*args, **kwargs)

    def watched(self, *args: object, **kwargs: object) -> Any:
        """Run the module's forward while listeners are attached."""
        assert self.watch is not None
        watch = self.watch(RunCall(self, Call(self.module, args, kwargs)))
        return watch.output_of(lambda: self.original(*args, **kwargs))


def noop_hook(module: nn.Module, args: Args, *rest: object) -> None:
    """Do nothing, as a torch hook: a module that has one notices hooks added while it runs."""


# --------------------------------------------------------------------------------------------------
# One call of a tapped module, and the watch on the functions that it calls.
# --------------------------------------------------------------------------------------------------


class TappedCall:
    """One call of a tapped module, in a run or in a program.

    Attributes:
        module: the module.
        call: its call.
        parts: the number of processes over which the heads are sharded.
    """

    module: nn.Module
    call: Call
    parts = 1

    @property
    def in_user_function(self) -> bool:
        """Tell whether a user's function is running, whose computation is not the model's."""
        raise NotImplementedError

    def points(self, channel: str) -> Sequence[HookPoint]:
        """Return the hook points of a channel."""
        raise NotImplementedError

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """Return the hook points on these channels that have listeners."""
        raise NotImplementedError

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        """Show a tensor to the hook points of a channel, and return their result.

        Args:
            channel: the channel.
            x: the tensor.
            private: whether it was made for these hook points and is not referenced elsewhere.
        """
        raise NotImplementedError


class RunCall(TappedCall):
    """One call of a tapped module in a run.

    Args:
        tap: the tap.
        call: the call.
    """

    def __init__(self, tap: Tap, call: Call) -> None:
        self.tap, self.module, self.call = tap, tap.module, call
        self._run: ForwardPass | None = CURRENT.get().run

    @property
    def in_user_function(self) -> bool:
        """Tell whether a user's function is running, outside any pass or in a pass that it
        started."""
        return CURRENT.get().run is not self._run

    def points(self, channel: str) -> Sequence[HookPoint]:
        """Return the hook points of a channel."""
        return self.tap.points.get(channel, ())

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """Return the hook points on these channels with listeners that are visible to the current
        code."""
        return self.tap.active_points(channels)

    def show(
        self, channel: str, x: Tensor, private: bool = False, gathered: bool = False
    ) -> Tensor:
        """Show a tensor on a channel; see `TappedCall`.

        Args:
            channel, x, private: as there.
            gathered: it is that of all processes already.
        """
        points, call = self.points(channel), self.call
        if not gathered and (shared := self.tap.shared.get(channel)) is not None:
            active = self.active_points((channel,))
            if not active:
                return x
            return shared.agreed(x, active, lambda full: self.show(channel, full, gathered=True))
        if private and len(points) == 1:
            call = replace(call, private=True)
        for point in points:
            if "@" in point.point.site.path and not self.tap.is_under_way(point):
                continue
            if point.sources:
                call.sources = point.sources_seen()
            x = point.apply(x, call)
        return x


class CallWatch(Watch):
    """A watch on one call of a tapped module.

    Args:
        shown: the call.
    """

    def __init__(self, shown: TappedCall) -> None:
        super().__init__()
        self.shown = shown

    @staticmethod
    def functions(module: nn.Module) -> Iterable[tuple[MutableMapping[str, Any], str]]:
        """Return the functions to patch that a module looks up while it runs: namespaces and
        names.
        """
        return ()

    @property
    def in_user_function(self) -> bool:
        return self.shown.in_user_function

    def output_of(self, run: Callable[[], Any]) -> Any:
        """Run the module with all of its functions watched; return its output.

        Args:
            run: its forward.
        """
        with self:
            return run()


# --------------------------------------------------------------------------------------------------
# Functions that a model looks up by name while it runs, and how they are patched.
# --------------------------------------------------------------------------------------------------


#: The replacement of a function: it is called with the function, its name, and the call.
Instead = Callable[[Function, str, Args, Kwargs], Any]


#: Lock: held while a function is patched or restored, and while a tap is installed or removed,
#: since bridges share them.
LOCK = threading.RLock()


#: The replacement of patched functions in this context; None: the functions themselves.
INSTEAD: ContextVar[Instead | None] = ContextVar("transformer_bridge_instead", default=None)


class PatchedFunction:
    """A patch of one function in a namespace, active only in contexts that set `INSTEAD`.

    Args:
        namespace: the namespace in which the function is looked up.
        name: its name.

    Attributes:
        own: the original function.
    """

    def __init__(self, namespace: MutableMapping[str, Any], name: str) -> None:
        self._namespace, self._name = namespace, name
        self._users: dict[int, weakref.ref[object]] = {}
        self.own: Function = namespace[name]
        functools.update_wrapper(self, self.own)

    def __call__(self, *args: object, **kwargs: object) -> object:
        instead = INSTEAD.get()
        if instead is None:
            return self.own(*args, **kwargs)
        return instead(self.own, self._name, args, kwargs)

    @classmethod
    def install(
        cls, namespace: MutableMapping[str, Any], name: str, user: object
    ) -> Callable[[], None]:
        """Patch a function until the returned one is called, or the user is garbage-collected."""
        with LOCK:
            patch = namespace[name]
            if not isinstance(patch, cls):
                patch = cls(namespace, name)
            namespace[name] = patch  # also if the finalizer of a freed model has just removed it
            # `weakref.finalize` would be slower, in each layer of every run.
            use = weakref.ref(user, patch._leave)
            patch._users[id(use)] = use
        return functools.partial(patch._leave, use)

    def _leave(self, use: weakref.ref[object]) -> None:
        """Remove the patch after its last user, unless the entry was replaced meanwhile."""
        with LOCK:
            if self._users.pop(id(use), None) is None or self._users:
                return
            if self._namespace[self._name] is self:
                self._namespace[self._name] = self.own
