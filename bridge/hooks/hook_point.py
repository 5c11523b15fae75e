"""`HookPoint`: a named place in a model where functions can read and change an activation."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from adapters.points import Point
from adapters.views import Call, Deferred

#: ``fn(activation, hook=point)`` returns the new activation, or None to leave it (or what was done to it in place).
HookFunction = Callable[..., Tensor | None]


class Owner:
    """Whose hooks are whose: a thread.

    Args:
        thread: the thread.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = weakref.ref(thread)

    @property
    def ended(self) -> bool:
        """Whether the thread is over, so that nobody can run with its hooks any more."""
        thread = self.thread()
        return thread is None or not thread.is_alive()


class ThreadState(threading.local):
    """What a thread's runs share: its identity, and what its current forward pass has seen so far."""

    def __init__(self) -> None:
        self.owner = Owner(threading.current_thread())
        self.step: int | None = None
        #: How many of the user's functions we are inside of: what they compute is not the model's.
        self.within = 0
        self._renew()

    def _renew(self) -> None:
        #: Tells this run from those that its hooks may start.
        self.run = object()
        self.sources: dict[Any, Any] = {}
        self.followed: dict[HookPoint, Tensor] = {}
        self.branched: dict[str, Tensor] = {}
        self.mask: tuple[Any, Tensor | None] | None = None
        self.start_at: int | None = None
        self.skipping: frozenset[nn.Module] = frozenset()
        self.entering: dict[nn.Module, Tensor] = {}

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """A run of its own: it sees nothing of a run in whose hooks it was started, and leaves nothing to it."""
        before = dict(self.__dict__)
        self._renew()
        try:
            yield
        finally:
            step = self.step
            self.__dict__.update(before)
            self.step = step


STATE = ThreadState()


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """Something attached to a hook point.

    Attributes:
        kind: ``fwd`` and ``bwd`` are functions of the user; ``read`` only looks at the activation, ``edge`` is given
            the activation that later computation uses, to ask for its gradient; ``follow`` takes over what was written
            at another point.
        fn: called as ``fn(activation, hook=point)``.
        owner: the thread whose runs it belongs to.
        permanent, level: what `reset_hooks` asks for.
        lazy: of a ``read``: it takes a `Deferred` in place of an activation that would have to be computed.
    """

    kind: Literal["fwd", "bwd", "read", "edge", "follow"]
    fn: Callable[..., Any]
    owner: Owner
    permanent: bool = False
    level: int | None = None
    lazy: bool = False


class Handle:
    """Takes back what one `add_hook` added."""

    def __init__(self, point: HookPoint, listener: Listener) -> None:
        self._point, self._listener = point, listener

    def remove(self) -> None:
        """Removes the hook. Doing it twice does nothing."""
        self._point._wiring.remove(self._point, (self._listener,))

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
    """

    __slots__ = ("_wiring", "ctx", "home", "listeners", "name", "order", "point", "reader", "sources", "view")

    def __init__(self, point: Point, order: int, wiring: Any) -> None:
        self.name = point.name
        self.point = point
        self.view = point.view
        self.order = order
        self.ctx: dict[Any, Any] = {}
        self.listeners: tuple[Listener, ...] = ()
        #: The only listener, where it is one that only looks: a cache, which is most of what there is.
        self.reader: Listener | None = None
        # The hooks on the site (None where it is inside of a module) and on the sources, kept by the wiring.
        self.home: Any = None
        self.sources: tuple[Any, ...] = ()
        self._wiring = wiring

    def __repr__(self) -> str:
        hooks = f", {len(self.listeners)} hooks" if self.listeners else ""
        return f"HookPoint({self.name}: [{self.point.axes}]{hooks})"

    @property
    def fwd_hooks(self) -> list[Handle]:
        """The functions that were added to it, by their handles."""
        return [Handle(self, listener) for listener in self.listeners if listener.kind == "fwd"]

    @property
    def bwd_hooks(self) -> list[Handle]:
        """The functions of gradients that were added to it, by their handles."""
        return [Handle(self, listener) for listener in self.listeners if listener.kind == "bwd"]

    def set_listeners(self, listeners: tuple[Listener, ...]) -> None:
        """Replaces all listeners (the wiring's part: it attaches what they need)."""
        self.listeners = listeners
        self.reader = listeners[0] if len(listeners) == 1 and listeners[0].kind == "read" else None

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
        fn: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Adds a function that sees, and may change, the activation in every run of this thread until it is removed.

        Args:
            fn: called as ``fn(activation, hook=point)`` with the activation (or, with ``dir="bwd"``, its gradient).
                It may return a new tensor of the same shape, or change the given one in place, or neither.
            dir: ``"fwd"`` or ``"bwd"``.
            is_permanent: only `reset_hooks` with ``including_permanent=True`` removes it.
            level: a number that `reset_hooks` can be told to remove alone.
            prepend: run it before the functions that are already there.

        Returns:
            A handle with `remove()`.

        Raises:
            ValueError: `dir` is neither ``"fwd"`` nor ``"bwd"``.
            TypeError: `fn` cannot be called.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> handle = bridge.blocks[0].hook_mlp_out.add_hook(lambda activation, hook: activation * 0)
            >>> handle.remove()
        """
        if dir not in ("fwd", "bwd"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd" or "bwd"')
        if not callable(fn):
            raise TypeError(f"the hook for {self.name} is {fn!r}, which cannot be called")
        listener = Listener(cast(Literal["fwd", "bwd"], dir), fn, STATE.owner, is_permanent, level)
        return self._wiring.add(self, listener, prepend)

    def add_perma_hook(self, fn: HookFunction, dir: str = "fwd") -> Handle:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise.

        Args:
            fn, dir: as for `add_hook`.
        """
        return self.add_hook(fn, dir, is_permanent=True)

    def remove_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes this thread's hooks.

        Args:
            dir: which of them.
            including_permanent: permanent ones too.
            level: only those that were added at this level.

        Raises:
            ValueError: `dir` is none of the three.
        """
        if dir not in ("fwd", "bwd", "both"):
            raise ValueError(f'dir is {dir!r}; it must be "fwd", "bwd" or "both"')
        # Only the user's own: what a running cache has attached goes with the cache.
        kinds = ("fwd", "bwd") if dir == "both" else (dir,)
        mine = [
            listener
            for listener in self.listeners
            if (listener.owner is STATE.owner or listener.owner.ended)
            and listener.kind in kinds
            and (including_permanent or not listener.permanent)
            and (level is None or listener.level == level)
        ]
        self._wiring.remove(self, mine)

    def clear_context(self) -> None:
        """Empties `ctx`."""
        self.ctx = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the hooks on a tensor as if the model had computed it here, and returns what they make of it."""
        return self.fire(x, Call(nn.Identity(), (x,), {}), identity=True)

    def fire(self, x: Tensor, call: Call, identity: bool = False, shield: bool = False) -> Tensor:
        """Shows the site's tensor to this thread's listeners, and returns what the site's tensor is to be.

        With `shield`, the tensor will be written to afterwards: what is kept of it has to be a copy.
        """
        owner, view, reader = STATE.owner, self.view, self.reader
        if reader is not None:
            if reader.owner is owner:
                self.look(reader, x, call, identity, shield)
            return x
        mine = [listener for listener in self.listeners if listener.owner is owner]
        if not mine:
            return x
        act = x if identity else view.get(x, call)
        edits = [listener for listener in mine if listener.kind in ("fwd", "follow")]
        if shield or (edits and view.writes_through):
            act = act.clone()  # what others hold as the old value must not change under them
        changed, backward = False, []
        for listener in mine:
            if listener.kind == "read":
                listener.fn(act, hook=self)
            elif listener.kind in ("fwd", "follow"):
                new = self._edit(listener, act)
                if new is not None:
                    act, changed = new, True
            else:
                backward.append(listener)
        if backward and torch.is_grad_enabled() and act.is_floating_point():
            if not act.requires_grad:
                # Nothing before this point wants a gradient (frozen weights): the graph starts here.
                act, changed = act.detach().clone().requires_grad_(), True
            elif not (view.identity or identity):
                changed = True  # the gradient has to flow through the activation as it is seen
        if changed:
            x = act if identity else view.put(x, act, call)
        if self.point.followers:
            if changed:
                STATE.followed[self] = act
            else:
                STATE.followed.pop(self, None)
        if backward:
            seen = x if view.identity or identity else act
            for listener in backward:
                self._listen_backward(listener, seen)
        return x

    def look(self, reader: Listener, x: Tensor, call: Call, identity: bool = False, shield: bool = False) -> None:
        """Shows the site's tensor to a listener that only looks (see `fire`)."""
        view = self.view
        if view.later and reader.lazy and not (identity or shield or torch.is_grad_enabled() or x.is_inference()):
            reader.fn(Deferred(view, x, call), hook=self)
            return
        if identity or view.identity:
            act = x
        elif torch.is_grad_enabled():
            with torch.no_grad():  # what is only looked at is no part of the graph
                act = view.get(x, call)
        else:
            act = view.get(x, call)
        reader.fn(act.clone() if shield else act, hook=self)

    def _edit(self, listener: Listener, act: Tensor) -> Tensor | None:
        """What a user's function makes of an activation; None when nothing came of it.

        The function gets a copy of its own, so that nothing that holds the activation can change under it. With
        gradients on, that copy is what later computation uses even when unchanged: `retain_grad` on it works.
        """
        given = act.clone()
        version = None if given.is_inference() else given._version
        new = self._ask(listener, given)
        if new is None:
            # Writing back an untouched copy is exact, except where the activation is computed beside the model.
            touched = not self.view.contextual or version is None or given._version != version or given.requires_grad
            return given if touched else None
        if not isinstance(new, Tensor):
            raise TypeError(
                f"the hook {_describe(listener.fn)} at {self.name} returned {type(new).__name__}; "
                "it must return a tensor or None"
            )
        if new.shape != act.shape:
            raise ValueError(
                f"the hook {_describe(listener.fn)} at {self.name} returned shape {list(new.shape)}; "
                f"the activation has shape {list(act.shape)} ({self.point.axes})"
            )
        if new.device != act.device:
            raise ValueError(
                f"the hook {_describe(listener.fn)} at {self.name} returned a tensor on {new.device}; "
                f"the activation is on {act.device}"
            )
        return new.to(act.dtype)

    def _ask(self, listener: Listener, given: Tensor) -> Any:
        """Calls a user's function."""
        STATE.within += 1
        try:
            return listener.fn(given, hook=self)
        except TypeError as error:
            if _takes_hook(listener.fn):
                raise
            raise TypeError(
                f"the hook {_describe(listener.fn)} at {self.name} takes {inspect.signature(listener.fn)}, but it is "
                "called as fn(activation, hook=point): give it a second parameter named `hook`"
            ) from error
        finally:
            STATE.within -= 1

    def _listen_backward(self, listener: Listener, seen: Tensor) -> None:
        if listener.kind == "edge":
            listener.fn(seen, hook=self)
            return
        if not seen.requires_grad:
            return

        def on_gradient(gradient: Tensor) -> Tensor | None:
            given = gradient.clone()  # autograd may hand the same tensor to others
            version = given._version
            new = self._ask(listener, given)
            if isinstance(new, tuple) and len(new) == 1:
                (new,) = new
            if new is None:
                return given if given._version != version else None
            if not isinstance(new, Tensor):
                raise TypeError(
                    f"the backward hook {_describe(listener.fn)} at {self.name} returned {type(new).__name__}; "
                    "it must return a tensor or None"
                )
            if new.shape != gradient.shape:
                raise ValueError(
                    f"the backward hook {_describe(listener.fn)} at {self.name} returned shape {list(new.shape)}; "
                    f"the gradient has shape {list(gradient.shape)} ({self.point.axes})"
                )
            return new

        seen.register_hook(on_gradient)


def _takes_hook(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with an activation and ``hook=``; True where that cannot be known."""
    try:
        inspect.signature(fn).bind(None, hook=None)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def _describe(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or repr(fn)
