"""Packages whose parts are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def lazily(package: str, *modules: str, **names: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package. Type checkers read its imports under ``TYPE_CHECKING``.

    Args:
        package: its name.
        modules: modules of it.
        names: names that are in a module of it, with that module.

    Returns:
        The two functions.

    Example:
        >>> from adapters.imports.lazily import lazily
        >>> __getattr__, __dir__ = lazily("json", "decoder", JSONEncoder="encoder")
        >>> __getattr__("decoder").__name__, __getattr__("JSONEncoder").__name__
        ('json.decoder', 'JSONEncoder')
    """

    def get(name: str) -> object:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *modules, *names})

    return get, listed
