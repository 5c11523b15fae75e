"""Lookup of hook points by name, alias or filter, with errors that suggest a name."""

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
from bridge.arguments import listed
from bridge.hooks.hooks import HookPoint

# --------------------------------------------------------------------------------------------------
# Short names of hook points, as HookedTransformer's `get_act_name` reads them.
# --------------------------------------------------------------------------------------------------


SHORT = {
    "attn": "pattern",
    "scores": "attn_scores",
    "attn_logits": "attn_scores",
    "query": "q",
    "key": "k",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
IN_ATTENTION = {
    "q",
    "k",
    "v",
    "z",
    "result",
    "pattern",
    "attn_scores",
    "rot_q",
    "rot_k",
}
IN_MLP = {"pre", "post", "pre_linear", "mid"}


def act_name(
    name: str,
    layer: SupportsIndex | str | None = None,
    layer_type: str | None = None,
    stack: str = "blocks",
) -> str:
    """Return the full name of a hook point from its short name, as HookedTransformer's
    `get_act_name` does.

    Args:
        name: a short name such as ``q``, ``resid_pre``, ``scale``; a short name with the layer and
            the part, such as ``q3`` or ``scale4ln1``; or a full name.
        layer: the block, or None outside of the blocks.
        layer_type: the part of the block, if the name does not include it: ``a`` or ``attn``, ``m``
            or ``mlp``, or a norm such as ``ln1``.
        stack: the list of blocks.

    Returns:
        A name such as ``blocks.3.attn.hook_q``.

    Example:
        >>> from bridge import act_name
        >>> (
        ...     act_name("q", 3),
        ...     act_name("normalized", 2, "ln1"),
        ...     act_name("embed"),
        ...     act_name("scale4ln1"),
        ... )
        ('blocks.3.attn.hook_q', 'blocks.2.ln1.hook_normalized', 'hook_embed',
        'blocks.4.ln1.hook_scale')
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    together = re.fullmatch(r"([a-z_]+)(\d+)(\w*)", name)
    if together and layer is None and layer_type is None:
        name, layer, layer_type = together.groups()
    name = SHORT.get(name, name)
    part = PARTS.get(layer_type or "", layer_type or "")
    if not part:
        stem = name.partition(".")[0]  # after the dot: a basis
        part = "attn" if stem in IN_ATTENTION else "mlp" if stem in IN_MLP else ""
    if name in ("scale", "normalized") and not part and layer is None:
        part = "ln_final"
    pieces: list[str] = []
    if layer is not None:
        pieces = [stack, layer if isinstance(layer, str) else str(index(layer))]
    if part:
        pieces.append(part)
    return ".".join([*pieces, f"hook_{name}"])


def last_stream(hook_dict: Mapping[str, object], n_layers: int) -> str:
    """Return the name of the last block's output; with a norm on the stream (BERT), of the norm's
    output.

    Args:
        hook_dict: a bridge's hook points, by name.
        n_layers: the number of its blocks.
    """
    normed = f"blocks.{n_layers - 1}.hook_normalized_resid_post"
    return normed if normed in hook_dict else f"blocks.{n_layers - 1}.hook_resid_post"


# --------------------------------------------------------------------------------------------------
# Pure functions of a name, whose selections can be cached.
# --------------------------------------------------------------------------------------------------


_PLAIN = (str, int, float, bool, bytes, type(None), re.Pattern)
#: Pure builtins.
_FUNCTIONS = frozenset(
    (
        "abs",
        "all",
        "any",
        "bool",
        "enumerate",
        "filter",
        "frozenset",
        "int",
        "isinstance",
        "len",
        "list",
        "map",
        "max",
        "min",
        "range",
        "reversed",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "zip",
    )
)
#: Attributes of such values, and of their results: pure methods.
_METHODS = frozenset(
    name
    for kind in (str, int, tuple, list, set, dict, re, re.Pattern, re.Match)
    for name in dir(kind)
)
_KNOWN = _FUNCTIONS | {name for name in _METHODS if not name.startswith("__")}


def what_it_depends_on(function: Callable[..., Any]) -> Hashable | None:
    """Return what a function's result depends on besides its argument; None if unknown.

    It is known for a plain function that reads strings and numbers from its scope, and calls only
    their methods, `re` and some builtins. Two functions with the same code location and the same
    captured values are treated as one.

    Args:
        function: a function of one string.

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
        return None  # a variable without a value
    if not all(map(_is_plain, read)):
        return None
    return function.__code__, tuple([(repr(value), value) for value in read])


def _is_plain(value: object) -> bool:
    """Tell whether a value is immutable and determined by its repr."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN or value is re


@functools.lru_cache(maxsize=256)
def _names_read(code: types.CodeType) -> tuple[str, ...] | None:
    """Return the globals and attributes that code reads; None if one may be anything."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_names = _names_read(inner)
            if inner_names is None:
                return None
            names |= dict.fromkeys(inner_names)
    return tuple(names)


#: A selection of hook points: None (all), a name, several names, or a function of the name.
NamesFilter = str | Sequence[str | HookPoint] | Callable[[str], bool] | None


class UnknownHookError(KeyError):
    """An error for a name that no hook point has."""

    def __str__(self) -> str:
        return str(self.args[0])


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean ...?``, or an empty string if no name is close."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def named_one_by_one(names: NamesFilter | HookPoint) -> bool:
    """Tell whether a filter lists hook points by name, in which case each of them must run."""
    return names is not None and (isinstance(names, HookPoint) or not callable(names))


class WhenAsked(Mapping[str, Tensor]):
    """A mapping from names to activations that computes each on access.

    Args:
        held: the inputs of the computation, by name.
        make: computes an activation from its name and `held`.
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
        not_offered: names, or prefixes, of unavailable points, with the reasons.
    """

    def __init__(
        self, points: dict[str, HookPoint], not_offered: Mapping[str, str] | None = None
    ) -> None:
        self.points = points
        self._not_offered = not_offered or {}
        self._aliases: dict[str, str] | None = None
        self._remembered: dict[Hashable, tuple[int, tuple[HookPoint, ...]]] = {}
        self._flags: tuple[int, list[str]] | None = None  # of heavy hook points

    def refresh(self) -> None:
        """Rebuild the index after hook points were added or removed."""
        self._aliases = self._flags = None
        self._remembered.clear()

    @property
    def aliases(self) -> dict[str, str]:
        """Return the canonical name of every alias."""
        if self._aliases is None:
            self._aliases = {
                alias: name for name, hook in self.points.items() for alias in hook.point.aliases
            }
        return self._aliases

    def find(self, name: str) -> HookPoint:
        """Return the hook point of this name or alias.

        Raises:
            UnknownHookError: there is no such hook point.
        """
        if not isinstance(name, str):
            raise UnknownHookError(f"{name!r} cannot name a hook point: names are strings")
        hook = self.points.get(name)
        if hook is None:
            canonical = self.aliases.get(name)
            if canonical is None:
                raise UnknownHookError(self._why_unknown(name))
            hook = self.points[canonical]
        return hook

    def _why_unknown(self, name: str) -> str:
        """Return the message about a name that no hook point has."""
        if reason := self._not_offered.get(name):
            return f"{name} cannot be shown: {reason}"
        hint = self._hint_at_layers(name) or self._hint_at_module(name)
        hint = hint or self._hint_at_missing_layer(name)
        hint = hint or suggestion(name, (*self.points, *self.aliases))
        return f"there is no hook point {name!r}.{hint}"

    def _hint_at_layers(self, name: str) -> str:
        """Return a hint about the layers that have this hook point; "" if there are none."""
        match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
        if match is None:
            return ""
        stack, layer, inner = match.groups()
        in_stack = [full for full in self.points if re.match(rf"{stack}\.\d+\.", full)]
        layers = sorted({int(full.split(".")[1]) for full in in_stack})
        known = self.points.keys() | self.aliases.keys()
        having = [str(i) for i in layers if f"{stack}.{i}.{inner}" in known]
        if not having:
            return ""
        if int(layer) not in layers:
            return (
                f" This model has {len(layers)} layers: {stack}.{layers[0]} to"
                f" {stack}.{layers[-1]}."
            )
        return f" The layers that have it are {', '.join(having)}."

    def _hint_at_module(self, name: str) -> str:
        """Return a hint about the hook points at a module, if the name is its path; otherwise
        ""."""
        paths = {hook.name: module_path(hook.point.site.path) for hook in self.points.values()}
        hooks = [hook for hook, path in paths.items() if path == name]
        if not hooks and name.count(".") > 1:
            hooks = [hook for hook, path in paths.items() if path.startswith(f"{name}.")]
        if not hooks:
            return ""
        return f" It is the path of a module; the hook points there are {listed(hooks, 6)}."

    def _hint_at_missing_layer(self, name: str) -> str:
        """Return a hint for a name without its layer, such as ``hook_z`` or ``pattern``; else
        "".
        """
        endings = (name, f"hook_{name}", act_name(name))
        by_ending: dict[str, list[str]] = {}
        for full in (*self.points, *self.aliases):
            stack, _, rest = full.partition(".")
            index, _, inner = rest.partition(".")
            if not stack or not index.isdigit():
                continue
            if any(inner == end or inner.endswith(f".{end}") for end in endings):
                by_ending.setdefault(f".{inner}", []).append(full)
        hints = [
            f"{names[0]}, or in Python, for all {len(names)} layers that have it, "
            f"lambda name: name.endswith({ending!r})"
            for ending, names in by_ending.items()
        ]
        return f" A name says the layer: {'; '.join(hints[:3])}." if hints else ""

    def _accepted(self, names: Callable[[str], bool]) -> list[HookPoint]:
        """Return the hook points that a function accepts, cached if the function is pure."""
        key = what_it_depends_on(names)
        known = None if key is None else self._remembered.get(key)
        if known is not None and known[0] == len(self.points):
            return list(known[1])
        chosen = [
            hook
            for hook in self.points.values()
            if names(hook.name) or any(map(names, hook.point.aliases))
        ]
        if not chosen:
            raise ValueError(
                f"the filter {getattr(names, '__name__', names)!r} matches none of the"
                f" {len(self.points)} hook points, such as {', '.join(list(self.points)[:3])}"
            )
        if key is not None:
            if len(self._remembered) >= 32:
                self._remembered.clear()
            self._remembered[key] = len(self.points), tuple(chosen)
        return chosen

    def _unfiltered(self, is_on: Callable[[str], bool]) -> list[HookPoint]:
        """Return the standard hook points and the enabled heavy ones, cached for each choice of
        flags.
        """
        if self._flags is None or self._flags[0] != len(self.points):
            flags = dict.fromkeys(
                hook.point.flag for hook in self.points.values() if hook.point.group == "heavy"
            )
            self._flags = len(self.points), [flag for flag in flags if flag]
        on = ("flags", *[flag for flag in self._flags[1] if is_on(flag)])
        known = self._remembered.get(on)
        if known is None or known[0] != len(self.points):
            chosen: list[HookPoint] = []
            for hook in self.points.values():
                group = hook.point.group
                if group == "standard" or (group == "heavy" and hook.point.flag in on):
                    chosen.append(hook)
            known = self._remembered[on] = len(self.points), tuple(chosen)
        return list(known[1])

    def _known(self, name: str | HookPoint) -> HookPoint:
        """Return the hook point of a name, or the hook point itself.

        Raises:
            UnknownHookError: there is none.
            ValueError: it belongs to another bridge, or was removed.
        """
        if isinstance(name, str):
            return self.find(name)
        if self.points.get(name.name) is not name:
            raise ValueError(f"{name!r} belongs to another bridge, or was removed")
        return name

    def select(self, names: NamesFilter, is_on: Callable[[str], bool]) -> list[HookPoint]:
        """Return the hook points that a filter selects, in the order of the computation.

        Args:
            names: see `NamesFilter`. A function is called with every canonical name and alias; a
                point is selected if the function accepts any of its names.
            is_on: tells, for each flag, whether None includes its heavy hook points.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the filter selects nothing.
            TypeError: it is not a valid filter.
        """
        if names is None:
            return self._unfiltered(is_on)
        if isinstance(names, str):
            return [self.find(names)]
        if callable(names):
            return self._accepted(names)
        if isinstance(names, Sequence):
            for name in names:
                if not isinstance(name, str | HookPoint):
                    raise TypeError(
                        f"a list of names holds {name!r}, which is neither a name nor a hook point"
                    )
            if not names:
                raise ValueError(
                    "the list of names is empty: it would choose no hook point; pass None for all"
                )
            return sorted(set(map(self._known, names)), key=lambda hook: hook.order)
        raise TypeError(
            f"names_filter is {type(names).__name__}; it must be a name, a list of names, a"
            " function, or None"
        )
