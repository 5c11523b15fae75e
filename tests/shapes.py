"""How every annotation of our packages is checked in every test: by beartype, shapes by jaxtyping.

jaxtyping's import hook writes ``@jaxtyping.jaxtyped(...)`` over every function and class of the
packages. Its own decorator binds the arguments anew at each call, and writes two checkers for each
function when a module is imported: that was half of the time of all tests. `lazily_checked` stands
in for it. It writes one checker, when the function is first called, and opens a scope for the names
of axes only where annotations have some.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS, isgeneratorfunction
from itertools import chain, repeat
from types import CodeType, FunctionType
from typing import Any, ParamSpecArgs, ParamSpecKwargs, Self, get_args

import jaxtyping
import torch
from beartype import BeartypeConf, FrozenDict, beartype
from beartype.door import die_if_unbearable
from jaxtyping import install_import_hook
from jaxtyping._import_hook import Typechecker

_jaxtyped = jaxtyping.jaxtyped  # before anything stands in for it
# What looks for the user's line in a stack passes over the checkers' frames: those of this file are
# theirs as well.
sys.modules["jaxtyping.lazily"] = sys.modules[
    __name__
]  # torch's compiler looks a function's module up
__name__ = "jaxtyping.lazily"


class Checks:
    """Whether annotations are checked just now: in each test, of the first calls of each
    function.
    """

    on = True
    test = 0
    calls = 20


@cache
def _conf(protocols: frozenset[type]) -> BeartypeConf:
    overrides = FrozenDict(dict.fromkeys([*protocols, Self], object))
    return BeartypeConf(
        is_pep484_tower=True, hint_overrides=overrides, violation_type=jaxtyping.TypeCheckError
    )


def _inside(hint: object) -> Iterator[object]:
    """An annotation and those that it is made of."""
    if isinstance(hint, list):  # the arguments of a callable
        for part in hint:
            yield from _inside(part)
        return
    yield hint
    for part in get_args(hint):
        yield from _inside(part)


def _resolved(function: FunctionType) -> dict[str, Any]:
    """The annotations of a function, evaluated. What is local to a function, or there for mypy
    alone, is left out.
    """
    hints = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError, TypeError):  # TypeError: a class that is generic only for mypy
            hints[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return hints


def _conf_for(function: FunctionType, hints: dict[str, Any]) -> BeartypeConf:
    """How they are checked. Protocols and `Self` are mypy's: to ask whether an object has a
    property computes it.
    """
    known = chain(function.__globals__.values(), *map(_inside, hints.values()))
    return _conf(
        frozenset(
            hint
            for hint in known
            if isinstance(hint, type)
            and getattr(hint, "_is_protocol", False)
            and not getattr(hint, "_is_runtime_protocol", False)
        )
    )


def _has_shapes(hints: dict[str, Any]) -> bool:
    parts = chain.from_iterable(map(_inside, hints.values()))
    return any(
        isinstance(part, type) and issubclass(part, jaxtyping.AbstractArray) for part in parts
    )


def _in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for whose call names of axes have one size each."""

    def scoped(*args: Any, **kwargs: Any) -> Any:
        with _jaxtyped("context"):
            return function(*args, **kwargs)

    return scoped


def _checker(function: FunctionType) -> Callable[..., Any]:
    """A function that checks what it is called with and what it returns."""
    hints = _resolved(function)
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, hints
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    checking = beartype(conf=_conf_for(function, hints))(copy)
    return _in_scope(checking) if _has_shapes(hints) else checking


OF_A_PARAMSPEC = (ParamSpecArgs, ParamSpecKwargs)


@cache
def _once(code: CodeType) -> dict[str, Any]:
    """What is worked out once for functions of the same code."""
    return {}


def _checker_without_code(function: FunctionType) -> Callable[..., Any]:
    """Likewise without writing one: for a function that another one makes anew at each call, and
    for a generator.

    What a generator is given is checked when it is called. It runs later, in the scope of whoever
    goes through it.
    """
    code = function.__code__
    known = _once(code)
    if not known:
        hints = {
            name: hint
            for name, hint in _resolved(function).items()
            if not isinstance(hint, OF_A_PARAMSPEC)
        }
        known.update(hints=hints, conf=_conf_for(function, hints), shapes=_has_shapes(hints))
    hints, conf = known["hints"], known["conf"]
    named = code.co_argcount + code.co_kwonlyargcount
    names, rest = code.co_varnames[: code.co_argcount], list(code.co_varnames[named:])
    more = rest.pop(0) if code.co_flags & CO_VARARGS else ""
    other = rest.pop(0) if code.co_flags & CO_VARKEYWORDS else ""

    def check(name: str, value: object) -> None:
        if name in hints:
            die_if_unbearable(
                value, hints[name], conf=conf, exception_prefix=f"{function.__qualname__}, {name}: "
            )

    def checking(*args: Any, **kwargs: Any) -> Any:
        for name, value in zip(chain(names, repeat(more)), args, strict=False):
            check(name, value)
        for name, value in kwargs.items():
            check(name if name in code.co_varnames[:named] else other, value)
        out = function(*args, **kwargs)
        check("return", out)
        return out

    return _in_scope(checking) if known["shapes"] else checking


def _lazily(function: FunctionType) -> FunctionType:
    if not function.__annotations__:
        return function
    checking: Callable[..., Any] | None = None
    test, calls = -1, 0

    @wraps(function)
    def lazily(*args: Any, **kwargs: Any) -> Any:
        nonlocal checking, test, calls
        if not Checks.on or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if test != Checks.test:
            test, calls = Checks.test, 0
        calls += 1
        if calls > Checks.calls:
            return function(*args, **kwargs)
        if checking is None:
            no_code = "<locals>" in function.__qualname__ or isgeneratorfunction(function)
            checking = (_checker_without_code if no_code else _checker)(function)
        return checking(*args, **kwargs)

    return lazily


def lazily_checked(target: Any) -> Any:
    """A decorator of a function, or of a class that may be a dataclass."""
    if isinstance(target, type):
        made = vars(target).get("__init__")
        if (
            dataclasses.is_dataclass(target)
            and made is not None
            and not hasattr(made, "__wrapped__")
        ):
            target.__init__ = _lazily(made)
        return target
    if isinstance(target, property):
        return property(
            *(part and _lazily(part) for part in (target.fget, target.fset, target.fdel))
        )
    if isinstance(target, classmethod | staticmethod):
        return type(target)(_lazily(target.__func__))
    return _lazily(target)


def install(packages: list[str]) -> None:
    """Has every function and class of packages checked that is imported from now on."""
    install_import_hook(packages, "beartype.beartype").__enter__()
    by_the_hook = Typechecker.lookup.values()

    def jaxtyped(*args: Any, **kwargs: Any) -> Any:
        return (
            lazily_checked
            if kwargs.get("typechecker") in by_the_hook
            else _jaxtyped(*args, **kwargs)
        )

    jaxtyping.jaxtyped = jaxtyped
