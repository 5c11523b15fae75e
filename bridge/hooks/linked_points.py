"""Points that take over what is written at another one: `hook_attn_in` feeds the query, key and value inputs."""

from __future__ import annotations

from torch import Tensor

from adapters.points import LinkedPoint
from bridge.hooks.context import PassMemory


class LeaderEdit:
    """The listener of a follower: what was written at its leader in a pass; None where nothing was.

    Args:
        leader: the name of the other point.
        follower: how its value is the activation here.
    """

    def __init__(self, leader: str, follower: LinkedPoint) -> None:
        self._leader, self._follower = leader, follower

    def __call__(self, run: PassMemory | None) -> Tensor | None:
        written = None if run is None else run.written.get(self._leader)
        return None if written is None else self._follower.convert(written)
