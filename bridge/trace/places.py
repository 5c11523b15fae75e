"""Where things are in the model's order, as far as that is known before it runs.

Blocks follow each other, and what comes before and behind them. Inside a block the declared order of hook points is
not always that of the computation (values may be computed before queries), so there only the run itself can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.hooks.hook_point import HookPoint

#: A list of blocks and an index in it; of what stands outside of blocks, "" and the depth.
Group = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """A hook point, or a module's input or output, in the model's order.

    Attributes:
        name: of the hook point; or the module's path and what of it.
        group: where it belongs to, None where that is not known.
        order: its number among the hook points; of a module, that of the hook points in its group.
    """

    name: str
    group: Group | None
    order: int


class ModelOrder:
    """The order of one model's hook points and modules.

    Args:
        points: its hook points by name, in the order of the computation.
    """

    def __init__(self, points: dict[str, HookPoint]) -> None:
        self.total = len(points)
        self._points = points
        self._of = {
            hook: Place(name, group_of(hook), number) for number, (name, hook) in enumerate(_as_computed(points))
        }
        self._ends: dict[Group, HookPoint | None] = {}
        self._by_path: dict[str, Place] = {}
        self._blocks: dict[int, Place] = {}
        before: HookPoint | None = None
        for hook in points.values():
            group = group_of(hook)
            if before is not None and group_of(before) != group and _is_plain(hook):
                self._ends.setdefault(group_of(before), hook)
                before = hook
            elif before is None or group_of(before) == group:
                before = hook
            self._by_path.setdefault(hook.point.site.path, self._of[hook])
            if hook.point.stack in ("blocks", "encoder"):
                self._blocks.setdefault(hook.point.depth, self._of[hook])

    def are_of(self, points: dict[str, HookPoint]) -> bool:
        """Whether they are those of these hook points, all of them."""
        return points is self._points and len(points) == self.total

    def of(self, hook: HookPoint) -> Place:
        """The place of a hook point."""
        return self._of[hook]

    def end_of(self, group: Group | None) -> HookPoint | None:
        """The first plain hook point behind a group; None where there is none."""
        return None if group is None else self._ends.get(group)

    def block(self, layer: int) -> Place | None:
        """Where a block of the first list begins."""
        return self._blocks.get(layer)

    def of_module(self, path: str, what: str) -> Place:
        """The place of a module's input or output: that of the block it is in."""
        inside = path
        while inside:
            near = self._by_path.get(inside)
            if near is not None and ((near.group is not None and near.group[0]) or inside == path):
                return Place(f"{path}.{what}", near.group, near.order)
            inside = inside.rpartition(".")[0]
        return Place(f"{path or 'the model'}.{what}", None, -1)


def group_of(hook: HookPoint) -> Group:
    """The group of a hook point."""
    return hook.point.stack, hook.point.depth


def _as_computed(points: dict[str, HookPoint]) -> list[tuple[str, HookPoint]]:
    """Hook points in the order of the computation, where that of their declaration is another.

    Norms of queries and keys are behind what they read, and what goes into a mixer before the rest of it.
    """
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, name in enumerate(points):
        part, _, end = name.rpartition(".")
        last[name] = number
        first.setdefault(part, number)
        if end == "hook_in":  # of a projection: declared behind what it makes
            last[f"{part.rpartition('.')[0]}.hook_{part.rpartition('.')[2]}"] = number

    def key(item: tuple[int, tuple[str, HookPoint]]) -> tuple[float, int]:
        number, (name, _) = item
        part, _, end = name.rpartition(".")
        above, _, norm = part.rpartition(".")
        if norm in ("q_norm", "k_norm"):
            return last.get(f"{above}.hook_{norm[0]}", number) + 0.5, number
        if part.endswith(".mixer") and end.startswith("hook_in_proj"):
            return first[part] - 0.5, number
        return number, number

    return [item for _, item in sorted(enumerate(points.items()), key=key)]


def has_passed(wanted: Place, here: Place) -> bool:
    """Whether it is certain that the model has passed a place when it is at another."""
    known = wanted.group is not None and here.group is not None and wanted.group != here.group
    return known and wanted.order < here.order


def _is_plain(hook: HookPoint) -> bool:
    return not (hook.view.contextual or hook.point.sources) and hook.point.site.kind in ("input", "output")
