"""A declaration as plain data, and back: lists, objects and numbers, never code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import adapters.views
from adapters.architecture import vocabulary
from adapters.views import View

#: All that a declaration may be made of, by name. Nothing else is ever made from a file.
_VOCABULARY: Mapping[str, Callable[..., object]] = {
    cls.__name__: cls
    for cls in (
        *vocabulary(),
        *(cls for cls in vars(adapters.views).values() if isinstance(cls, type) and issubclass(cls, View)),
    )
}
#: What says that an object is one of the vocabulary, a mapping, a list (a JSON list is a tuple), or no finite number.
_KIND, _MAP, _LIST, _NUMBER = "is", "map", "list", "number"


class CannotBeEncoded(ValueError):
    """A declaration holds something that no file can."""


def encoded(value: object) -> Any:
    """A declaration, or a value in it, as what JSON can hold.

    Args:
        value: the declaration.

    Raises:
        CannotBeEncoded: something in it is of no kind that declarations are made of, such as a view of a user's.

    Example:
        >>> from adapters.kept.encoding import decoded, encoded
        >>> from adapters.views import Heads
        >>> encoded(Heads(4)), decoded(encoded(Heads(4)))
        ({'is': 'Heads', 'n_heads': 4}, Heads)
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [encoded(each) for each in value]
    if isinstance(value, list):
        return {_LIST: [encoded(each) for each in value]}
    if isinstance(value, Mapping):
        return {_MAP: [[encoded(key), encoded(each)] for key, each in value.items()]}
    name = type(value).__name__
    if _VOCABULARY.get(name) is not type(value):
        raise CannotBeEncoded(f"{value!r} is a {type(value).__qualname__}, which no file of a declaration can hold")
    found = {key: getattr(value, key) for key in _arguments(name)}
    return {_KIND: name} | {key: encoded(each) for key, each in found.items() if each != _arguments(name)[key]}


def decoded(data: Any) -> Any:
    """The other way.

    Args:
        data: what `encoded` has made.

    Raises:
        ValueError: it has not; the message says what it is.
    """
    if isinstance(data, list):
        return tuple(decoded(each) for each in data)
    if not isinstance(data, dict):
        return data
    if _KIND in data:
        return _object(data)
    ((kind, held),) = data.items() if len(data) == 1 else [("", None)]
    if kind == _NUMBER:
        return float(str(held))
    if kind in (_LIST, _MAP) and isinstance(held, list):
        return [decoded(each) for each in held] if kind == _LIST else {key: decoded(each) for key, each in held}
    raise ValueError(f"{str(data)[:80]} is nothing that declarations are made of")


def _object(data: Mapping[str, Any]) -> object:
    name = data[_KIND]
    if name not in _VOCABULARY:
        raise ValueError(f"{name!r} is nothing that declarations are made of")
    given = {key: decoded(each) for key, each in data.items() if key != _KIND}
    if unknown := given.keys() - _arguments(name).keys():
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}")
    try:
        return _VOCABULARY[name](**given)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


@cache
def _arguments(name: str) -> dict[str, object]:
    """What one of the vocabulary is made from, with the defaults."""
    parameters = inspect.signature(_VOCABULARY[name]).parameters
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {key: each.default for key, each in parameters.items() if each.kind == plain}
