"""The table of TransformerLens' names (`names.toml`), and the modules in it that are another module here."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOM = __name__.rpartition(".")[0]
_TABLE: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
#: Modules that are another one here; the names of the package itself, each with its place.
MODULES, NAMES = _TABLE["modules"], _TABLE["names"]
#: What to use in place of names that are left out on purpose, by module or class; of the API of version 4, by class.
MISSING, API, DIFFERS = _TABLE["missing"], _TABLE["api"], _TABLE["differs"]


def why_not(where: str, name: str) -> str | None:
    """What to use in place of a name that is left out on purpose of a module or a class."""
    inside = where.removeprefix(ROOM).removeprefix(".") or "package"
    inside = inside if inside in API else MODULES.get(inside, inside)
    instead = API.get(inside, {}).get(name) or MISSING.get(inside, {}).get(name)
    if instead is None and inside in ("utilities", "utilities.devices", "utilities.activation_functions", "slices"):
        instead = MISSING["utils"].get(name)
    instead = instead or MISSING["package"].get(name)
    if name.startswith("convert_") and name.endswith("_weights"):
        instead = MISSING["package"]["pretrained"]
    return None if instead is None else f"{where} has no {name}: {instead}. See docs/migration.md"


class Tabled(MetaPathFinder, Loader):
    """Finds the modules of the table. It comes last: for a module that is left out, the error says what to use."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{ROOM}."):
            return None
        if fullname.removeprefix(f"{ROOM}.") in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        where, _, name = fullname.rpartition(".")
        if why := why_not(where, name):
            raise ModuleNotFoundError(why)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts our module where Python looks for the one that it has just made."""
        place = MODULES[module.__name__.removeprefix(f"{ROOM}.")]
        ours = importlib.import_module(place if place.startswith("bridge.") else f"{ROOM}.{place}")
        ours.__dict__.setdefault("__path__", [])  # others may be below it
        sys.modules[module.__name__] = ours


def named(name: str) -> Any:
    """What the package has under a name.

    Raises:
        KeyError: nothing.
    """
    where, _, attribute = NAMES[name].partition(":")
    module = importlib.import_module(f"{ROOM}.{where}")
    return getattr(module, attribute) if attribute else module
