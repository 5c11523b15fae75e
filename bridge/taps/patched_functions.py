"""Functions that a model looks up by name while it runs, and how they are patched."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
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
        leave = weakref.finalize(holder, self.uninstall)
        leave.atexit = False
        return leave

    def restore(self) -> None:
        """Puts back what was there."""
        self.namespace[self.name] = self._own


@contextmanager
def calling_instead(instead: Instead) -> Iterator[None]:
    """Calls something else in place of the patched functions, inside a ``with`` statement."""
    token = _INSTEAD.set(instead)
    try:
        yield
    finally:
        _INSTEAD.reset(token)
