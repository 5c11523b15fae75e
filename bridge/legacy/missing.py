"""The error for a name that TransformerLens has and this package has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from bridge.hooks.names import suggestion


def missing(module: str, name: str, instead: Mapping[str, str], known: Iterable[str]) -> AttributeError:
    """What a module's ``__getattr__`` raises.

    Args:
        module: its name.
        name: what was asked for.
        instead: what to use in place of names that are left out on purpose.
        known: the names that it has.

    Example:
        >>> from bridge.legacy.missing import missing
        >>> str(missing("m", "sum", {"sum": "torch.sum adds"}, []))
        'm has no sum: torch.sum adds. See docs/migration.md'
    """
    if name in instead:
        return AttributeError(f"{module} has no {name}: {instead[name]}. See docs/migration.md")
    return AttributeError(f"module {module!r} has no attribute {name!r}.{suggestion(name, list(known))}")


def not_done(name: str, why: str) -> Callable[..., Any]:
    """A function that can be imported, and says why it is not done when it is called.

    Args:
        name: its name.
        why: and what to do in its place.
    """

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not done here: {why}. See docs/migration.md")

    refuse.__name__ = name
    return refuse
