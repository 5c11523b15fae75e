"""Points that take over what is written at another one: `hook_attn_in` feeds the query, key and value inputs."""

from __future__ import annotations

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


class TakeOver:
    """A listener's function for a follower: what was written at its leader in this pass; None where nothing was."""

    def __init__(self, leader: HookPoint, follower: Follower) -> None:
        self._leader, self._follower = leader, follower

    def __call__(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        run = CURRENT.get().run
        written = None if run is None else run.written.get(self._leader)
        return None if written is None else self._follower.convert(written)
