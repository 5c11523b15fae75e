"""Functions of a name that answer the same each time, so that what they choose can be remembered."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Hashable
from typing import Any

_PLAIN = (str, int, float, bool, bytes, type(None), re.Pattern)
#: Python's own functions that answer the same each time.
_PURE = (
    abs,
    all,
    any,
    bool,
    enumerate,
    filter,
    frozenset,
    int,
    isinstance,
    len,
    list,
    map,
    max,
    min,
    range,
    reversed,
    set,
)
_FUNCTIONS = frozenset(function.__name__ for function in (*_PURE, sorted, str, sum, tuple, zip))
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
        >>> from bridge.hooks.filter_functions import what_it_depends_on
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
