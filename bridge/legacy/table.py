"""The names of TransformerLens 2 and 4, by one table (`names.toml`): where each is here, or what to use instead."""

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
_TABLE: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
#: Modules that are another one here; the names of each module that are defined elsewhere, with their places.
MODULES, NAMES = _TABLE["modules"], _TABLE["names"]
#: What to use in place of names that are left out on purpose, by module or class; of the API of version 4, by class.
MISSING, API, DIFFERS = _TABLE["missing"], _TABLE["api"], _TABLE["differs"]


def why_not(where: str, name: str) -> str | None:
    """What to use in place of a name that is left out on purpose of a module or a class."""
    inside = _inside(where)
    inside = inside if inside in API else MODULES.get(inside, inside)
    instead = API.get(inside, {}).get(name) or MISSING.get(inside, {}).get(name)
    instead = instead or MISSING["package"].get(name)
    if name.startswith("convert_") and name.endswith("_weights"):
        instead = MISSING["package"]["pretrained"]
    return None if instead is None else f"{where} has no {name}: {instead}. See docs/migration.md"


def at(place: str) -> Any:
    """What is at a place of the table: a module of this package, or of the bridge, or ``module:name``."""
    where, _, name = place.partition(":")
    module = importlib.import_module(where if where.startswith("bridge.") else f"{ROOM}.{where}")
    return getattr(module, name) if name else module


def named(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``: what the table has under a name. An error says what to use in place of another one;
    it is shown by ``from module import name``, too.

    Example:
        >>> from bridge.legacy import table, utilities
        >>> table.named("bridge.legacy.utilities")("get_act_name")("k", 2)
        'blocks.2.attn.hook_k'
        >>> table.named("bridge.legacy")("lit")
        Traceback (most recent call last):
        AttributeError: bridge.legacy has no lit: there is no connection to LIT. See docs/migration.md
    """
    inside = _inside(module)
    places = NAMES.get(inside, {})
    above = {"" if module == ROOM else inside, *(name for name, place in MODULES.items() if place == inside)}
    below = {name.rpartition(".")[2]: name for name in MODULES if name.rpartition(".")[0] in above}
    if below and module in sys.modules:
        vars(sys.modules[module]).setdefault("__path__", [])  # Python looks for them in packages alone

    def get(name: str) -> Any:
        if name in places:
            return vars(sys.modules[module]).setdefault(name, at(places[name]))
        why = why_not(module, name)
        if name in below and why is None:
            return importlib.import_module(f"{ROOM}.{below[name]}")
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        from_import = _is_imported()  # of an AttributeError, that statement would show nothing
        raise (ImportError if from_import else AttributeError)(why or _unknown(module, name, places))

    return get


def not_done(name: str, why: str = MISSING["utilities"]["MMLU_SUBJECTS"]) -> Callable[..., Any]:
    """A function that can be imported, and says why it is not done when it is called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not done here: {why}. See docs/migration.md")

    refuse.__name__ = name
    return refuse


def _inside(module: str) -> str:
    return module.removeprefix(ROOM).removeprefix(".") or "package"


def _unknown(module: str, name: str, places: Mapping[str, str]) -> str:
    suggestion = at("bridge.hooks.names:suggestion")  # which loads torch: importing the package does not
    return f"module {module!r} has no attribute {name!r}.{suggestion(name, [*dir(sys.modules[module]), *places])}"


def _is_imported() -> bool:
    """Whether what asks for a name is ``from module import name``."""
    frame, ours = currentframe(), (ROOM.partition(".")[0], "jaxtyping")  # in tests a type checker stands between
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        frame = frame.f_back
    return frame is not None and opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


class Tabled(MetaPathFinder, Loader):
    """Finds the modules of the table. It comes last: for a module that is left out, the error says what to use."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{ROOM}."):
            return None
        if _inside(fullname) in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        if why := why_not(*fullname.rpartition(".")[::2]):
            raise ModuleNotFoundError(why)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts our module where Python looks for the one that it has just made."""
        sys.modules[module.__name__] = at(MODULES[_inside(module.__name__)])
