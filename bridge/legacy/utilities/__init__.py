"""The modules that HookedTransformer keeps under `utilities`, and in TransformerLens 3 and 4 all that is in `utils`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["activation_functions", "devices"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # Python's own questions
        raise AttributeError(name)
    modules = [importlib.import_module(f"bridge.legacy.{where}") for where in ("utilities.devices", "utils")]
    found = next((module for module in modules if name in vars(module)), modules[-1])  # which says what is missing
    return getattr(found, name)
