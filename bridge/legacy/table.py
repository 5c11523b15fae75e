"""The names of TransformerLens 2 and 4 (`names.toml`): their place here, or what to use instead."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Mapping
from dis import opname
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import currentframe
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOM = __name__.rpartition(".")[0]
_TABLE: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("names.toml").read_text("utf-8")
)
#: Modules that have another name here; for each module, the names defined elsewhere, with their
#: locations.
MODULES, NAMES = _TABLE["modules"], _TABLE["names"]
#: Replacements for names that are deliberately not available, by module or class; for the API of
#: version 4, by class.
MISSING, API, DIFFERS = _TABLE["missing"], _TABLE["api"], _TABLE["differs"]


def why_not(where: str, name: str) -> str | None:
    """Return the error message for a deliberately missing name of a module or class; None if there
    is no entry.
    """
    inside = _inside(where)
    if inside not in API:
        inside = MODULES.get(inside, inside)
    instead = API.get(inside, {}).get(name) or MISSING.get(inside, {}).get(name)
    instead = instead or MISSING["package"].get(name)
    if name.startswith("convert_") and name.endswith("_weights"):
        instead = MISSING["package"]["pretrained"]
    return None if instead is None else f"{where} has no {name}: {instead}. See docs/migration.md"


def locate(place: str) -> Any:
    """Return the object at a location in the table: a module of this package or of the bridge, or
    ``module:name``.
    """
    where, _, name = place.partition(":")
    module = importlib.import_module(where if where.startswith("bridge.") else f"{ROOM}.{where}")
    return getattr(module, name) if name else module


def named(module: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, which looks names up in the table. For a missing name, the
    error says what to use instead, also in ``from module import name``.

    Example:
        >>> from bridge.legacy import table, utilities
        >>> table.named("bridge.legacy")("EasyTransformer").__name__
        'HookedTransformer'
        >>> table.named("bridge.legacy")("lit")
        Traceback (most recent call last):
        AttributeError: bridge.legacy has no lit: there is no connection to LIT. See
            docs/migration.md
    """
    inside = _inside(module)
    places = NAMES.get(inside, {})
    aliases = {name for name, place in MODULES.items() if place == inside}
    aliases.add("" if module == ROOM else inside)
    below = {}
    for name in MODULES:
        parent, _, last = name.rpartition(".")
        if parent in aliases:
            below[last] = name
    if below and module in sys.modules:
        # Python looks for submodules in packages only.
        vars(sys.modules[module]).setdefault("__path__", [])

    def get(name: str) -> Any:
        if name in places:
            return vars(sys.modules[module]).setdefault(name, locate(places[name]))
        why = why_not(module, name)
        if name in below and why is None:
            return importlib.import_module(f"{ROOM}.{below[name]}")
        if name.startswith("__"):  # Python's own lookups
            raise AttributeError(name)
        # The statement `from module import name` would hide the message of an AttributeError.
        error = ImportError if _is_imported() else AttributeError
        raise error(why or _unknown(module, name, places))

    return get


def not_done(name: str, why: str) -> Callable[..., Any]:
    """Return a function that can be imported and raises an error with the reason when it is
    called.
    """

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not done here: {why}. See docs/migration.md")

    refuse.__name__ = name
    return refuse


def _inside(module: str) -> str:
    return module.removeprefix(ROOM).removeprefix(".") or "package"


def _unknown(module: str, name: str, places: Mapping[str, str]) -> str:
    # This loads torch, which importing the package does not.
    suggestion = locate("bridge.hooks.names:suggestion")
    hint = suggestion(name, [*dir(sys.modules[module]), *places])
    return f"module {module!r} has no attribute {name!r}.{hint}"


def _is_imported() -> bool:
    """Tell whether the lookup comes from ``from module import name``."""
    frame = currentframe()
    ours = (ROOM.partition(".")[0], "jaxtyping")  # in tests, a type checker's frame is in between
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        frame = frame.f_back
    return frame is not None and opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


class Tabled(MetaPathFinder, Loader):
    """An import finder for the modules of the table. It comes last; for a missing module, its error
    says what to use.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{ROOM}."):
            return None
        if _inside(fullname) in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        module, _, name = fullname.rpartition(".")
        why = why_not(module, name)
        if why:
            raise ModuleNotFoundError(why)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module that Python has just created with ours."""
        sys.modules[module.__name__] = locate(MODULES[_inside(module.__name__)])
