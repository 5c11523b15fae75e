"""Functions that a model looks up by name while it runs, and how they are patched."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Self

from adapters.views import Args, Kwargs

#: What is called in place of a function: it is given the function, its name, and the call.
Instead = Callable[[Callable[..., Any], str, Args, Kwargs], Any]

#: Held while a function is patched or restored.
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


class calling_instead:
    """Calls something else in place of the patched functions, inside a ``with`` statement.

    A generator would take longer, in each layer of every run.

    Args:
        instead: what is called.
    """

    __slots__ = ("_instead", "_token")

    def __init__(self, instead: Instead) -> None:
        self._instead = instead

    def __enter__(self) -> None:
        self._token = _INSTEAD.set(self._instead)

    def __exit__(self, *error: object) -> None:
        _INSTEAD.reset(self._token)
