"""Functions that a model looks up by name while it runs, with one of ours standing in for them."""

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

#: Held while something begins or ceases to stand in.
LOCK = threading.RLock()
#: What is called in place of functions in this context; None: the functions themselves.
_INSTEAD: ContextVar[Instead | None] = ContextVar("transformer_bridge_instead", default=None)


class StandIn:
    """Stands in for one function in a namespace: in a context that asks for it, something else is called.

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
    def stand(cls, namespace: MutableMapping[str, Any], name: str) -> Self:
        """The one that stands there, with one user more."""
        with LOCK:
            there = namespace[name]
            if not isinstance(there, cls):
                there = cls(namespace, name)
            there.users += 1
            namespace[name] = there  # also when a model that was freed meanwhile has just taken it away
            return there

    def leave(self) -> None:
        """Takes it away when nobody needs it any more, unless something else was put there meanwhile."""
        with LOCK:
            self.users -= 1
            if not self.users and self.namespace[self.name] is self:
                self.put_back()

    def left_with(self, holder: object) -> Callable[[], object]:
        """What leaves it: when it is called, or when what needs it is gone, whichever is first."""
        leave = weakref.finalize(holder, self.leave)
        leave.atexit = False
        return leave

    def put_back(self) -> None:
        """Puts back what was there."""
        self.namespace[self.name] = self._own


@contextmanager
def instead_of_them(instead: Instead) -> Iterator[None]:
    """Calls something else in place of the functions that are stood in for, inside a ``with`` statement."""
    token = _INSTEAD.set(instead)
    try:
        yield
    finally:
        _INSTEAD.reset(token)
