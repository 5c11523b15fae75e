"""``transformer_lens.components``'s names: the parts of a model, which stand for the Hugging Face model's own."""

from __future__ import annotations

import importlib

from bridge.legacy import kinds, table
from bridge.legacy.HookedTransformer import HookedTransformer as _HookedTransformer  # which makes parts by themselves
from bridge.legacy.kinds import *  # noqa: F403
from bridge.legacy.kinds import Part
from bridge.legacy.missing import explain_missing_name

__all__ = kinds.__all__
__path__: list[str] = []  # the modules of the table are below it

__getattr__ = explain_missing_name(__name__)

assert Part.makes_host is not None, _HookedTransformer

for _name in table.MODULES:  # HookedTransformer has a module for each class
    if _name.startswith("components."):
        importlib.import_module(f"bridge.legacy.{_name}")
