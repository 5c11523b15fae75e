"""How every annotation of our packages is checked in every test: by beartype, shapes by jaxtyping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Self, get_args

from beartype import BeartypeConf, FrozenDict, beartype


@cache
def _conf(protocols: frozenset[type]) -> BeartypeConf:
    return BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict(dict.fromkeys([*protocols, Self], object)))


def _inside(hint: object) -> Iterator[object]:
    """An annotation and those that it is made of."""
    if isinstance(hint, list):  # the arguments of a callable
        for part in hint:
            yield from _inside(part)
        return
    yield hint
    for part in get_args(hint):
        yield from _inside(part)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks its annotations.

    Protocols and `Self` are left to mypy: to ask at run time whether an object has a property, Python would compute it,
    and jaxtyping decorates functions, which know no class.
    """
    known = list(getattr(function, "__globals__", {}).values())
    for hint in getattr(function, "__annotations__", {}).values():
        known += _inside(hint)
    protocols = {
        hint
        for hint in known
        if isinstance(hint, type)
        and getattr(hint, "_is_protocol", False)
        and not getattr(hint, "_is_runtime_protocol", False)
    }
    return beartype(conf=_conf(frozenset(protocols)))(function)
