"""Finding hook points by name, alias or filter; errors that suggest what was meant."""

from __future__ import annotations

import difflib
import functools
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from torch import Tensor

from adapters.points import module_path
from bridge.hooks.arguments import listed
from bridge.hooks.hooks import HookPoint

# ----------------------------------------------------------------------------------------------------------------------
# Short names of hook points, as HookedTransformer's `get_act_name` reads them.
# ----------------------------------------------------------------------------------------------------------------------


_SHORT = {
    "attn": "pattern", "scores": "attn_scores", "attn_logits": "attn_scores", "query": "q", "key": "k", "value": "v",
    "mlp_pre": "pre", "mlp_mid": "mid", "mlp_post": "post",
}  # fmt: skip
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_IN_ATTENTION = {
    "q", "k", "v", "z", "result", "pattern", "attn_scores", "rot_q", "rot_k",
}  # fmt: skip
_IN_MLP = {"pre", "post", "pre_linear", "mid"}


def act_name(
    name: str, layer: SupportsIndex | str | None = None, layer_type: str | None = None, stack: str = "blocks"
) -> str:
    """The full name of a hook point from its short one, as HookedTransformer's `get_act_name` gives it.

    Args:
        name: a short name such as ``q``, ``resid_pre``, ``scale``; with the layer and the part in it, such as ``q3`` or
            ``scale4ln1``; or already a full one.
        layer: the block, or None outside of the blocks.
        layer_type: the part of the block where the name does not say it: ``a`` or ``attn``, ``m`` or ``mlp``, or a
            norm such as ``ln1``.
        stack: the list of blocks.

    Returns:
        Such as ``blocks.3.attn.hook_q``.

    Example:
        >>> from bridge import act_name
        >>> act_name("q", 3), act_name("normalized", 2, "ln1"), act_name("embed"), act_name("scale4ln1")
        ('blocks.3.attn.hook_q', 'blocks.2.ln1.hook_normalized', 'hook_embed', 'blocks.4.ln1.hook_scale')
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    together = re.fullmatch(r"([a-z_]+)(\d+)(\w*)", name)
    if together and layer is None and layer_type is None:
        name, layer, layer_type = together.groups()
    name = _SHORT.get(name, name)
    part = _PARTS.get(layer_type or "", layer_type or "")
    stem = name.partition(".")[0]  # behind the dot, a basis
    part = part or ("attn" if stem in _IN_ATTENTION else "mlp" if stem in _IN_MLP else "")
    if name in ("scale", "normalized") and not part and layer is None:
        part = "ln_final"
    pieces = [] if layer is None else [stack, layer if isinstance(layer, str) else str(index(layer))]
    if part:
        pieces.append(part)
    return ".".join([*pieces, f"hook_{name}"])


def last_stream(hook_dict: Mapping[str, object], n_layers: int) -> str:
    """The name of what leaves the last block: of blocks that end in a norm on the stream (BERT), what that makes.

    Args:
        hook_dict: a bridge's hook points, by name.
        n_layers: how many blocks it has.
    """
    normed = f"blocks.{n_layers - 1}.hook_normalized_resid_post"
    return normed if normed in hook_dict else f"blocks.{n_layers - 1}.hook_resid_post"


# ----------------------------------------------------------------------------------------------------------------------
# Functions of a name that answer the same each time, so that what they choose can be remembered.
# ----------------------------------------------------------------------------------------------------------------------


_PLAIN = (str, int, float, bool, bytes, type(None), re.Pattern)
#: Python's own functions that answer the same each time.
_FUNCTIONS = frozenset((
    "abs", "all", "any", "bool", "enumerate", "filter", "frozenset", "int", "isinstance", "len", "list", "map", "max",
    "min", "range", "reversed", "set", "sorted", "str", "sum", "tuple", "zip",
))  # fmt: skip
#: What such values have, and what they make has: methods that answer the same each time.
_METHODS = frozenset(
    name for kind in (str, int, tuple, list, set, dict, re, re.Pattern, re.Match) for name in dir(kind)
)
_KNOWN = _FUNCTIONS | {name for name in _METHODS if not name.startswith("__")}


def what_it_depends_on(function: Callable[..., Any]) -> Hashable | None:
    """What the answers of a function depend on besides its argument; None where that cannot be known.

    It can of a plain function that reads strings and numbers around it, and calls nothing but their methods, `re` and
    some of Python's own functions. Two that are written at one place and read the same are one.

    Args:
        function: called with a string.

    Example:
        >>> from bridge.hooks.names import what_it_depends_on
        >>> end, seen = "hook_z", []
        >>> what_it_depends_on(lambda name: name.endswith(end)) is None
        False
        >>> what_it_depends_on(lambda name: seen.append(name)) is None
        True
    """
    names = _names_read(function.__code__) if type(function) is types.FunctionType else None
    if names is None:
        return None
    around = function.__globals__
    if any(name not in around and name not in _KNOWN for name in names):
        return None
    read = [around[name] for name in names if name in around]
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        read += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None  # a variable that has no value yet
    if not all(map(_is_plain, read)):
        return None
    return function.__code__, tuple([(repr(value), value) for value in read])


def _is_plain(value: object) -> bool:
    """Whether a value never changes, and is known by how it is written."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN or value is re


@functools.lru_cache(maxsize=256)
def _names_read(code: types.CodeType) -> tuple[str, ...] | None:
    """The globals and attributes in a piece of code; None where one of them may be anything."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = _names_read(inner)
            if found is None:
                return None
            names |= dict.fromkeys(found)
    return tuple(names)


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


class WhenAsked(Mapping[str, Tensor]):
    """Activations by name, each worked out when it is asked for.

    Args:
        held: what they are worked out from, by name.
        make: works one out, of its name and what is held.
    """

    def __init__(self, held: Mapping[str, Any], make: Callable[[str, Any], Tensor]) -> None:
        self._held, self._make = held, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name, self._held[name])

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


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
        return f" It is the path of a module; the hook points there are {listed(found, 6)}."

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
