"""Errors for what TransformerLens has and this package has not: they say what to use in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dis import opname
from inspect import currentframe
from typing import Any, NoReturn

from bridge.hooks.names import suggestion
from bridge.legacy.table import MISSING, ROOM, why_not


def explain_missing_name(module: str) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__``. What it says is shown by ``from module import name``, too.

    Example:
        >>> from bridge.legacy.missing import explain_missing_name
        >>> explain_missing_name("bridge.legacy")("lit")
        Traceback (most recent call last):
        AttributeError: bridge.legacy has no lit: there is no connection to LIT. See docs/migration.md
    """

    def refuse(name: str) -> NoReturn:
        known = f"module {module!r} has no attribute {name!r}.{suggestion(name, dir(sys.modules[module]))}"
        # Of an AttributeError, that statement would show nothing.
        raise (ImportError if _is_imported() else AttributeError)(why_not(module, name) or known)

    return refuse


def _is_imported() -> bool:
    """Whether what asks for a name is ``from module import name``."""
    frame, ours = currentframe(), (ROOM.partition(".")[0], "jaxtyping")  # in tests a type checker stands between
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        frame = frame.f_back
    return frame is not None and opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def not_done(name: str, why: str = MISSING["evals"]["MMLU_SUBJECTS"]) -> Callable[..., Any]:
    """A function that can be imported, and says why it is not done when it is called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not done here: {why}. See docs/migration.md")

    refuse.__name__ = name
    return refuse
