"""Finding hook points by name, alias or filter; errors that suggest what was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from adapters.paths import module_path
from bridge.hooks.act_names import act_name
from bridge.hooks.filter_functions import what_it_depends_on
from bridge.hooks.hook_point import HookPoint

#: What chooses hook points: nothing (all), a name, several names, or a function of the name.
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


class UnknownHookError(KeyError):
    """No hook point has this name."""

    def __str__(self) -> str:
        return str(self.args[0])


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` Did you mean ...?``, or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def named_one_by_one(names: NamesFilter | HookPoint) -> bool:
    """Whether a filter names hook points, so that each of them has to run."""
    return names is not None and (isinstance(names, HookPoint) or not callable(names))


class Names:
    """The hook points of a bridge by name and alias.

    Args:
        points: by canonical name, in the order of the computation.
        not_offered: names, or what they begin with, of points that are left out, with the reason.
    """

    def __init__(self, points: dict[str, HookPoint], not_offered: Mapping[str, str] | None = None) -> None:
        self.points, self._not_offered = points, not_offered or {}
        self._aliases: dict[str, str] | None = None
        self._remembered: dict[Hashable, tuple[int, tuple[HookPoint, ...]]] = {}
        self._flags: tuple[int, list[str]] | None = None  # of heavy hook points

    def refresh(self) -> None:
        """Looks at the hook points anew: some came or went."""
        self._aliases = self._flags = None
        self._remembered.clear()

    @property
    def aliases(self) -> dict[str, str]:
        """Every alias and the canonical name it stands for."""
        if self._aliases is None:
            self._aliases = {alias: name for name, hook in self.points.items() for alias in hook.point.aliases}
        return self._aliases

    def find(self, name: str) -> HookPoint:
        """The hook point of this name or alias.

        Raises:
            UnknownHookError: there is none.
        """
        hook = self.points.get(name) if isinstance(name, str) else None
        if hook is None:
            canonical = self.aliases.get(name) if isinstance(name, str) else None
            if canonical is None:
                if not isinstance(name, str):
                    raise UnknownHookError(f"{name!r} is no name of a hook point: names are strings")
                if reason := self._not_offered.get(name):
                    raise UnknownHookError(f"{name} cannot be shown: {reason}")
                hint = self._of_another_layer(name) or self._of_a_module(name) or self._of_all_layers(name)
                hint = hint or suggestion(name, (*self.points, *self.aliases))
                raise UnknownHookError(f"there is no hook point {name!r}.{hint}")
            hook = self.points[canonical]
        return hook

    def _of_another_layer(self, name: str) -> str:
        """Which layers there are, or have it, where a name is another layer's; "" elsewhere."""
        asked = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
        if asked is None:
            return ""
        stack, _, inner = asked.groups()
        every = {int(full.split(".")[1]) for full in self.points if re.match(rf"{stack}\.\d+\.", full)}
        having = [i for i in sorted(every) if {f"{stack}.{i}.{inner}"} & (self.points.keys() | self.aliases.keys())]
        if not having:
            return ""
        if int(asked[2]) not in every:
            return f" This model has {len(every)} layers: {stack}.{min(every)} to {stack}.{max(every)}."
        return f" The layers that have it are {', '.join(map(str, having))}."

    def _of_a_module(self, name: str) -> str:
        """The hook points at a module of the Hugging Face model, where a name is its path; "" elsewhere."""
        paths = {hook.name: module_path(hook.point.site.path) for hook in self.points.values()}
        found = [hook for hook, path in paths.items() if path == name]
        found = found or [hook for hook, path in paths.items() if path.startswith(f"{name}.") and name.count(".") > 1]
        if not found:
            return ""
        more = f" and {len(found) - 6} more" if len(found) > 6 else ""
        return f" It is the path of a module; the hook points there are {', '.join(found[:6])}{more}."

    def _of_all_layers(self, name: str) -> str:
        """What to write in place of a name without the layer, such as ``hook_z`` or ``pattern``; "" if it is none."""
        endings = (name, f"hook_{name}", act_name(name))
        found: dict[str, list[str]] = {}
        for full in (*self.points, *self.aliases):
            stack, _, rest = full.partition(".")
            index, _, inner = rest.partition(".")
            if stack and index.isdigit() and any(inner == end or inner.endswith(f".{end}") for end in endings):
                found.setdefault(f".{inner}", []).append(full)
        hints = [
            f"{names[0]}, or in Python, for all {len(names)} layers that have it, "
            f"lambda name: name.endswith({ending!r})"
            for ending, names in found.items()
        ]
        return f" A name says the layer: {'; '.join(hints[:3])}." if hints else ""

    def _accepted(self, names: Callable[[str], bool]) -> list[HookPoint]:
        """The hook points that a function accepts: remembered, where it can only answer the same again."""
        asked = what_it_depends_on(names)
        known = None if asked is None else self._remembered.get(asked)
        if known is not None and known[0] == len(self.points):
            return list(known[1])
        chosen = [hook for hook in self.points.values() if names(hook.name) or any(map(names, hook.point.aliases))]
        if not chosen:
            raise ValueError(
                f"the filter {getattr(names, '__name__', names)!r} matches none of the {len(self.points)} "
                f"hook points, such as {', '.join(list(self.points)[:3])}"
            )
        if asked is not None:
            if len(self._remembered) >= 32:
                self._remembered.clear()
            self._remembered[asked] = len(self.points), tuple(chosen)
        return chosen

    def _unfiltered(self, is_on: Callable[[str], bool]) -> list[HookPoint]:
        """The standard hook points, and the heavy ones whose flag is on: remembered for each choice of flags."""
        if self._flags is None or self._flags[0] != len(self.points):
            flags = dict.fromkeys(hook.point.flag for hook in self.points.values() if hook.point.group == "heavy")
            self._flags = len(self.points), [flag for flag in flags if flag]
        on = ("flags", *[flag for flag in self._flags[1] if is_on(flag)])
        found = self._remembered.get(on)
        if found is None or found[0] != len(self.points):
            groups = [(hook, hook.point.group, hook.point.flag) for hook in self.points.values()]
            chosen = [hook for hook, group, flag in groups if group == "standard" or (group == "heavy" and flag in on)]
            found = self._remembered[on] = len(self.points), tuple(chosen)
        return list(found[1])

    def select(self, names: NamesFilter, is_on: Callable[[str], bool]) -> list[HookPoint]:
        """The hook points that a filter chooses, in the order of the computation.

        Args:
            names: see `NamesFilter`. A function is asked about every canonical name and every alias: a point is chosen
                when it accepts any of its names.
            is_on: whether an absent filter includes the heavy hook points of a flag.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the filter chooses nothing.
            TypeError: it is none of the things that a filter can be.
        """
        if names is None:
            return self._unfiltered(is_on)
        if isinstance(names, str):
            return [self.find(names)]
        if callable(names):
            return self._accepted(names)
        if isinstance(names, Sequence):
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"a list of names holds {name!r}, which is no string")
            if not names:
                raise ValueError("the list of names is empty: it would choose no hook point; pass None for all")
            return sorted({self.find(name) for name in names}, key=lambda hook: hook.order)
        raise TypeError(
            f"names_filter is {type(names).__name__}; it must be a name, a list of names, a function, or None"
        )
