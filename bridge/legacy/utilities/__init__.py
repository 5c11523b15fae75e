"""The modules that HookedTransformer keeps under `utilities`, and in TransformerLens 3 and 4 all that is in `utils`."""

from __future__ import annotations

from typing import Any

from bridge.legacy.table import MODULES, at, named

__all__ = ["activation_functions", "devices"]


def __getattr__(name: str) -> Any:
    if name.startswith("__") or f"utilities.{name}" in MODULES:
        return named(__name__)(name)
    devices, utils = at("utilities.devices"), at("utils")  # the second of which says what is missing
    return getattr(devices if name in vars(devices) else utils, name)
