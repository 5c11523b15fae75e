"""The order of hook points when one comes in later."""

from __future__ import annotations

from bridge.hooks.hook_point import HookPoint


def order_behind(points: dict[str, HookPoint], hook: HookPoint, behind: HookPoint) -> None:
    """Moves a hook point right behind another one and what stands on that, and counts all of them anew.

    It comes before those that follow a point elsewhere, unless it does so itself: what they add goes on top.

    Args:
        points: the hook points by name, in their order; changed in place.
        hook: the one to be moved.
        behind: the other one.
    """
    in_order = [point for point in points.values() if point is not hook]
    at = in_order.index(behind) + 1
    following = {follower.name for point in in_order for follower in point.point.linked}
    last = hook.name in following
    while at < len(in_order) and in_order[at].name.startswith(f"{behind.name}."):
        if in_order[at].name in following and not last:
            break
        at += 1
    in_order.insert(at, hook)
    points.clear()
    points.update((point.name, point) for point in in_order)
    for order, point in enumerate(in_order):
        point.order = order
