"""How every annotation of our packages is checked in every test: by beartype, shapes by jaxtyping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Self, get_args

from beartype import BeartypeConf, FrozenDict, beartype


@cache
def _conf(protocols: frozenset[type]) -> BeartypeConf:
    optional = [protocol | None for protocol in protocols]
    return BeartypeConf(hint_overrides=FrozenDict(dict.fromkeys([*protocols, *optional, Self], object)))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks its annotations.

    Protocols and `Self` are left to mypy: to ask at run time whether an object has a property, Python would compute it, and
    jaxtyping decorates functions, which know no class.
    """
    named = [*getattr(function, "__globals__", {}).values(), *_inside(getattr(function, "__annotations__", {}).values())]
    protocols = {value for value in named if _is_bare_protocol(value)}
    return beartype(conf=_conf(frozenset(protocols)))(function)


def _inside(annotations: Iterable[Any]) -> Iterator[Any]:
    """The types in annotations, those in unions and containers included."""
    for annotation in annotations:
        yield annotation
        yield from _inside(get_args(annotation))


def _is_bare_protocol(value: object) -> bool:
    runtime = getattr(value, "_is_runtime_protocol", False)
    return isinstance(value, type) and getattr(value, "_is_protocol", False) and not runtime
