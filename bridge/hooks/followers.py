"""Points that take over what is written at another one: `hook_attn_in` feeds the query, key and value inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from adapters.points import Follower
from bridge.hooks.context import CURRENT
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import AttachesListeners, Listener


class Following:
    """A listener that takes over what is written at another point."""

    def __init__(self, attaches: AttachesListeners, point: HookPoint, listener: Listener) -> None:
        self._attaches, self._point, self._listener = attaches, point, listener

    def remove(self) -> None:
        """Removes it."""
        self._attaches.remove(self._point, (self._listener,))


def take_over_from(leader: HookPoint, follower: Follower) -> Callable[..., Tensor | None]:
    """A listener's function for a follower: what was written at its leader in this pass; None where nothing was."""

    def take_over(value: Tensor, hook: HookPoint) -> Tensor | None:
        run = CURRENT.get().run
        written = None if run is None else run.written.get(leader)
        return None if written is None else follower.convert(written)

    return take_over
