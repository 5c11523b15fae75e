"""Pictures of results: the functions of this package take what an analysis returns, as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import (
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
    runtime_checkable,
)

from bridge.pictures.pictures import Picture


@runtime_checkable
class Result(Protocol):
    """A result of an analysis that draws itself.

    Attributes:
        picture: the name of the function of `bridge.pictures` that draws it.
    """

    picture: ClassVar[str]

    def draw(self, **options: Any) -> Picture:
        """Draw it, with options of that function."""


P = ParamSpec("P")
T = TypeVar("T", contravariant=True)


class DrawsResults(Protocol[T, P]):
    """A function that draws numbers, or a result that holds them."""

    @overload
    def __call__(self, values: T, *args: P.args, **kwargs: P.kwargs) -> Picture: ...

    @overload
    def __call__(self, values: Result, **options: Any) -> Picture: ...


def draws_results(function: Callable[Concatenate[T, P], Picture]) -> DrawsResults[T, P]:
    """Return the function with results of analysis as its first argument, too: `Result.draw` passes
    on what they hold.

    Args:
        function: draws the numbers themselves.
    """

    @functools.wraps(function)
    def draw(*args: Any, **options: Any) -> Picture:
        result = args[0] if args else None
        if not isinstance(result, Result):
            return function(*args, **options)
        kind, name = type(result).__name__, function.__name__
        if result.picture != name:
            circuit = ""
            if name == "circuit" and hasattr(result, "top"):
                circuit = "; its top(20) is a circuit"
            raise TypeError(
                f"pictures.{name} does not draw {kind}: pictures.{result.picture} does, and so does"
                f" its method draw(){circuit}"
            )
        if len(args) > 1:
            raise TypeError(
                f"pictures.{name} takes a {kind} alone, and options by name: what else is drawn is"
                " in it"
            )
        return result.draw(**options)

    return draw  # type: ignore[return-value]
