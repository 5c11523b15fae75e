"""How every annotation of our packages is checked in every test: by beartype, shapes by jaxtyping."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype


@cache
def _conf(protocols: frozenset[type]) -> BeartypeConf:
    return BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict(dict.fromkeys([*protocols, Self], object)))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks its annotations.

    Protocols and `Self` are left to mypy: to ask at run time whether an object has a property, Python would compute it,
    and jaxtyping decorates functions, which know no class.
    """
    protocols = {
        value
        for value in getattr(function, "__globals__", {}).values()
        if isinstance(value, type)
        and getattr(value, "_is_protocol", False)
        and not getattr(value, "_is_runtime_protocol", False)
    }
    return beartype(conf=_conf(frozenset(protocols)))(function)
