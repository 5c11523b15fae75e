"""`Tap`: what stands before one module's own forward while somebody listens inside of it.

Most hook points are a module's input or output. Attention scores, one expert's neurons or the states of a recurrence
are in no module's: they exist while a forward runs. A tap lets that forward run, the model's own, and sees the torch
functions that it calls. Nothing is computed in its place but what somebody changes.

What comes in are the arguments of the module's call; what goes out is what the module returns. In between:

1. *Is anybody there?* A tap asks who of the present code listens on its channels (`Tap.active_points`). Where nobody
   does, it calls the forward that it stands before, and is out of the way.
2. *Watch.* A `CallWatch` (a mode of torch's functions) is on while the forward runs, or, where transformers looks the
   kernel up by name, while that kernel runs (`PatchedFunction`, `calling_instead`). It recognises what it knows by
   the function and its arguments: a softmax, a product of queries and keys, a kernel, an expert's matrix.
3. *Show.* What it recognised is shown on a channel (`Tap.show`): each hook point there sees it, as it would a
   module's output, and the function goes on with what they make of it.
4. *Check.* At the end a watch says what somebody listens to and nothing showed, with the reason and the cure.

A watch talks to one call of the module, a `TappedCall`: `RunCall` in a run; programs have one of their own, so that
what is recognised is written once for both. The kinds of taps are in `attention`, `experts` and `recurrence`;
`Wiring` puts them there and takes them away.

Not known here: families of models, names of hook points, torch hooks. What processes share of a channel's tensor is
asked of `SharedTensor`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, nn

from adapters.observe.observe import Watch
from adapters.points import call_number
from adapters.views import Args, Call, Kwargs
from bridge.hooks.context import CURRENT, ForwardPass, Scope, setting
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import InForwardsPlace
from bridge.sharing import SharedTensor


class Tap(InForwardsPlace):
    """Wraps one module's forward, for the hook points inside it.

    The hook points are kept by channel: what a site's `key` names.

    Args:
        module: the module.
        watch: the class of what sees the functions that one call of the module calls; None: `watched` knows it.

    Attributes:
        module, watch: likewise.
        points: the hook points, by channel.
        opened: the scopes that may begin to listen while the module runs.
        original: the forward that it wraps.
        shared: how what is shown is shared by processes, by channel; nothing where all is here.
        own: what stood in the module's dictionary before; None where the class's forward was used.
    """

    def __init__(self, module: nn.Module, watch: type[CallWatch] | None = None) -> None:
        self.module, self.watch = module, watch
        self.points: dict[str, tuple[HookPoint, ...]] = {}
        self.opened: tuple[Scope, ...] = ()
        self.shared: dict[str, SharedTensor] = {}
        #: What takes back what the tap has put elsewhere, for as long as it stands.
        self._undo: list[Callable[[], object]] = []

    def connect(self, channel: str, point: HookPoint) -> None:
        """Adds a hook point; the first one puts the tap before the module's forward."""
        if not (self.points or self.opened):
            self._install()
        self.points[channel] = (*self.points.get(channel, ()), point)

    def disconnect(self, channel: str, point: HookPoint) -> None:
        """Removes a hook point; the last one takes the tap away."""
        left = tuple([p for p in self.points[channel] if p is not point])
        if left:
            self.points[channel] = left
            return
        del self.points[channel]
        if not (self.points or self.opened):
            self._uninstall()

    def open(self, scope: Scope) -> None:
        """Watches the module for a scope that may begin to listen while it runs."""
        if not (self.points or self.opened):
            self._install()
        self.opened = (*self.opened, scope)

    def close(self, scope: Scope) -> None:
        """The reverse of `open`."""
        left = tuple([other for other in self.opened if other is not scope])
        gone, self.opened = left != self.opened, left
        if gone and not (self.points or self.opened):
            self._uninstall()

    def _install(self) -> None:
        """Puts the tap before the module's forward, for the first who needs it."""
        self.own: Callable[..., Any] | None = self.module.__dict__.get("forward")
        self.original: Callable[..., Any] = self.module.forward
        if self.watch is not None:
            patched = [PatchedFunction.install(there, name) for there, name in self.watch.functions(self.module)]
            self._undo += [each.uninstalled_with(self) for each in patched]
        # Past `nn.Module.__setattr__`, which looks for parameters in everything.
        self.module.__dict__["forward"] = self

    def _uninstall(self) -> None:
        """Takes the tap away, with the last who needs it."""
        there = self.module.__dict__.get("forward")
        while there is not self and isinstance(there, Tap) and there.own is not self:
            there = there.own
        if there is not self and isinstance(there, Tap):  # a tap of another kind wraps this one
            there.own, there.original = self.own, self.original
        elif self.own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.own
        self._undone()

    def _undone(self) -> None:
        while self._undo:
            self._undo.pop()()

    def active_points(self, channels: Sequence[str]) -> list[HookPoint]:
        """The hook points on these channels to which the present code listens."""
        context = CURRENT.get()
        start, visible = None if context.run is None else context.run.start_at, context.visible
        found = []
        for channel in channels:
            for point in self.points.get(channel, ()):
                if start is not None and point.point.depth < start:
                    continue
                for listener in point.listeners:
                    if listener.scope in visible:
                        if "@" not in point.point.site.path or self._is_under_way(point):
                            found.append(point)
                        break
        return found

    def _is_under_way(self, point: HookPoint) -> bool:
        """Whether the call of the module that a hook point means is the present one."""
        run, number = CURRENT.get().run, call_number(point.point.site.path)
        return run is not None and number is not None and run.is_call(self.module, number)

    def show(self, channel: str, x: Tensor, call: Call, whole: bool = False) -> Tensor:
        """Shows a tensor to the hook points of a channel, and returns what they make of it.

        Args:
            channel: the channel.
            x: the tensor.
            call: the call of the module.
            whole: it is whole already, where processes share it.
        """
        if self.shared and not whole and (shared := self.shared.get(channel)) is not None:
            points = self.active_points((channel,))
            if not points:
                return x
            return shared.agreed(x, points, lambda everything: self.show(channel, everything, call, True))
        for point in self.points.get(channel, ()):
            if "@" in point.point.site.path and not self._is_under_way(point):
                continue
            if point.sources:
                call.sources = point.sources_seen()
            x = point.apply(x, call)
        return x

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The module's forward while the tap is there."""
        visible = CURRENT.get().visible if self.opened else ()
        if self.active_points(tuple(self.points)) or any(scope in visible for scope in self.opened):
            return self.watched(*args, **kwargs)
        return self.original(*args, **kwargs)

    def watched(self, *args: object, **kwargs: object) -> Any:
        """The module's forward when somebody listens."""
        assert self.watch is not None
        watch = self.watch(RunCall(self, Call(self.module, args, kwargs)))
        return watch.output_of(lambda: self.original(*args, **kwargs))


def noop_hook(module: nn.Module, args: tuple[object, ...], *rest: object) -> None:
    """A torch hook that does nothing: a module that has one takes notice of others that come while it runs."""


# ----------------------------------------------------------------------------------------------------------------------
# One call of a tapped module, and what watches the functions that it calls.
# ----------------------------------------------------------------------------------------------------------------------


class TappedCall:
    """One call of a tapped module, in a run or in a program.

    Attributes:
        module: the module.
        call: its call.
        parts: over how many processes the heads are spread.
    """

    module: nn.Module
    call: Call
    parts = 1

    @property
    def in_user_function(self) -> bool:
        """Whether a user's function is being called: what it computes is not the model's."""
        raise NotImplementedError

    def points(self, channel: str) -> Sequence[HookPoint]:
        """The hook points of a channel."""
        raise NotImplementedError

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """The hook points on these channels to which somebody listens."""
        raise NotImplementedError

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        """Shows a tensor to the hook points of a channel, and returns what they make of it.

        Args:
            channel: the channel.
            x: the tensor.
            private: it was made for them: nobody else holds it.
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
        """Whether a user's function is being called, which runs in no pass or in one of its own."""
        return CURRENT.get().run is not self._run

    def points(self, channel: str) -> Sequence[HookPoint]:
        """The hook points of a channel."""
        return self.tap.points.get(channel, ())

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        """The hook points on these channels to which the present code listens."""
        return self.tap.active_points(channels)

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        """As `TappedCall` says."""
        alone = private and len(self.points(channel)) == 1 and channel not in self.tap.shared
        call = replace(self.call, private=True) if alone else self.call
        return self.tap.show(channel, x, call)


class CallWatch(Watch):
    """Shows what one call of a tapped module computes.

    Args:
        shown: the call.
    """

    def __init__(self, shown: TappedCall) -> None:
        super().__init__()
        self.shown = shown

    @staticmethod
    def functions(module: nn.Module) -> Iterable[tuple[MutableMapping[str, Any], str]]:
        """Functions that a module looks up while it runs and that are to be patched: where, and under which name."""
        return ()

    @property
    def in_user_function(self) -> bool:
        return self.shown.in_user_function

    def output_of(self, run: Callable[[], Any]) -> Any:
        """What the module returns, all of whose functions are seen.

        Args:
            run: its forward.
        """
        with self:
            return run()


# ----------------------------------------------------------------------------------------------------------------------
# Functions that a model looks up by name while it runs, and how they are patched.
# ----------------------------------------------------------------------------------------------------------------------


#: What is called in place of a function: it is given the function, its name, and the call.
Instead = Callable[[Callable[..., Any], str, Args, Kwargs], Any]


#: Held while a function is patched or restored, and while a tap comes or goes: bridges share them.
LOCK = threading.RLock()


#: What is called in place of functions in this context; None: the functions themselves.
_INSTEAD: ContextVar[Instead | None] = ContextVar("transformer_bridge_instead", default=None)


class PatchedFunction:
    """Patches one function in a namespace: in a context that asks for it, something else is called.

    Args:
        namespace: where the function is looked up.
        name: its name.

    Attributes:
        users: how many need it there.
    """

    def __init__(self, namespace: MutableMapping[str, Any], name: str) -> None:
        self.namespace, self.name = namespace, name
        self.users = 0
        self._uses: dict[int, weakref.ref[object]] = {}
        self._own: Callable[..., Any] = namespace[name]
        functools.update_wrapper(self, self._own)

    @property
    def own(self) -> Callable[..., Any]:
        """The function."""
        return self._own

    def __call__(self, *args: object, **kwargs: object) -> object:
        instead = _INSTEAD.get()
        return self.own(*args, **kwargs) if instead is None else instead(self.own, self.name, args, kwargs)

    @classmethod
    def install(cls, namespace: MutableMapping[str, Any], name: str) -> Self:
        """The patched function, with one user more."""
        with LOCK:
            there = namespace[name]
            if not isinstance(there, cls):
                there = cls(namespace, name)
            there.users += 1
            namespace[name] = there  # also when a model that was freed meanwhile has just taken it away
            return there

    def uninstall(self) -> None:
        """Takes it away when nobody needs it any more, unless something else was put there meanwhile."""
        with LOCK:
            self.users -= 1
            if not self.users and self.namespace[self.name] is self:
                self.restore()

    def uninstalled_with(self, holder: object) -> Callable[[], object]:
        """What leaves it: when it is called, or when what needs it is gone, whichever is first."""
        use = weakref.ref(holder, self._leave)  # `weakref.finalize` would take longer, in each layer of every run
        self._uses[id(use)] = use
        return functools.partial(self._leave, use)

    def _leave(self, use: weakref.ref[object]) -> None:
        with LOCK:
            if self._uses.pop(id(use), None) is not None:
                self.uninstall()

    def restore(self) -> None:
        """Puts back what was there."""
        self.namespace[self.name] = self._own


def calling_instead(instead: Instead) -> setting[Instead | None]:
    """Calls something else in place of the patched functions, inside a ``with`` statement.

    Args:
        instead: what is called.
    """
    return setting(_INSTEAD, instead)
