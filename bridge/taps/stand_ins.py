"""Functions that a model looks up by name while it runs, with one of ours standing in for them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

#: What is called in place of a function: it is given the function, its name, and the call.
Instead = Callable[[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], Any]

_LOCK = threading.RLock()
#: What is called in place of functions in this context; None: the functions themselves.
INSTEAD: ContextVar[Instead | None] = ContextVar("transformer_bridge_instead", default=None)


class StandIn:
    """Stands in for one function in a namespace: in a context that asks for it, something else is called.

    Args:
        namespace: where the function is looked up.
        name: its name.

    Attributes:
        own: the function.
        users: how many need it there.
    """

    def __init__(self, namespace: MutableMapping[str, Any], name: str) -> None:
        self._namespace, self._name = namespace, name
        self.own: Callable[..., Any] = namespace[name]
        self.users = 0
        functools.update_wrapper(self, self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        instead = INSTEAD.get()
        return self.own(*args, **kwargs) if instead is None else instead(self.own, self._name, args, kwargs)

    @classmethod
    def stand(cls, namespace: MutableMapping[str, Any], name: str) -> StandIn:
        """The one that stands there, with one user more."""
        with _LOCK:
            there = namespace[name]
            if not isinstance(there, StandIn):
                there = namespace[name] = cls(namespace, name)
            there.users += 1
            return there

    def leave(self) -> None:
        """Takes it away when nobody needs it any more, unless something else was put there meanwhile."""
        with _LOCK:
            self.users -= 1
            if not self.users and self._namespace[self._name] is self:
                self._namespace[self._name] = self.own
