"""Hook points that one run cannot serve together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from adapters.views import Branch
from bridge.hooks.context import CURRENT
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Listener


def check_clash(point: HookPoint, listener: Listener, in_block: Callable[[], Iterable[HookPoint]]) -> None:
    """Refuses what one run cannot give.

    Args:
        point: the hook point.
        listener: what is to be attached there.
        in_block: the hook points of the same block.

    Raises:
        ValueError: gradients are asked for at the norm that the heads share, in a run in which heads are
            given inputs of their own.
    """
    clash: Callable[[HookPoint], bool]
    if point.point.separate_consumers and listener.kind in ("bwd", "edge"):
        clash, kinds = _own_inputs, frozenset({"fwd", "bwd", "edge", "follow", "leader"})
    elif _own_inputs(point):
        clash, kinds = _shared_norm, frozenset({"bwd", "edge"})
    else:
        return
    context = CURRENT.get()
    for other in in_block():
        if clash(other) and any(
            x.kind in kinds and (x.scope is listener.scope or x.scope in context.visible) for x in other.listeners
        ):
            raise ValueError(
                f"{point.name} and {other.name} cannot be had together: with hooks at the one each head reads an "
                "input of its own, and then the gradient at the other, which all heads share, means nothing. "
                "Use two runs. (A filter is asked about every hook point: let it leave out names with attn_in and "
                "_input. For a cache of everything, switch set_use_split_qkv_input and set_use_attn_in off.)"
            )


def _own_inputs(point: HookPoint) -> bool:
    return point.point.flag in ("use_split_qkv_input", "use_attn_in") and not isinstance(point.view, Branch)


def _shared_norm(point: HookPoint) -> bool:
    return bool(point.point.separate_consumers)
