"""Look inside any Hugging Face language model, and change what happens there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bridge.other_adapters import check_adapters
from bridge.version import __version__, check_versions

check_adapters()  # before anything of that package is imported
check_versions()  # likewise

if TYPE_CHECKING:
    from bridge.bridge import TransformerBridge as TransformerBridge
    from bridge.cache import ActivationCache as ActivationCache
    from bridge.hooks.hooks import HookPoint as HookPoint
    from bridge.hooks.names import UnknownHookError as UnknownHookError
    from bridge.hooks.names import act_name as act_name
    from bridge.native import NativeConfig as NativeConfig
    from bridge.run.rules import Rules as Rules
    from bridge.run.tokenization import UnknownWordWarning as UnknownWordWarning
    from bridge.weights import FactoredMatrix as FactoredMatrix

_HOME = {
    "ActivationCache": "bridge.cache",
    "FactoredMatrix": "bridge.weights",
    "HookPoint": "bridge.hooks.hooks",
    "NativeConfig": "bridge.native",
    "Rules": "bridge.run.rules",
    "TransformerBridge": "bridge.bridge",
    "UnknownHookError": "bridge.hooks.names",
    "UnknownWordWarning": "bridge.run.tokenization",
    "act_name": "bridge.hooks.names",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
