"""The modules that HookedTransformer keeps under `utilities`, and in TransformerLens 3 and 4 all that is in `utils`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["activation_functions", "devices"]


def __getattr__(name: str) -> Any:
    # `utils` imports from here.
    return getattr(importlib.import_module("bridge.legacy.utils"), name)
