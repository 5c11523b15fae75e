"""Look inside any Hugging Face language model, and change what happens there."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.bridge import TransformerBridge
    from bridge.cache.activation_cache import ActivationCache
    from bridge.hooks.act_names import act_name
    from bridge.hooks.hook_point import HookPoint
    from bridge.hooks.names import UnknownHookError
    from bridge.native import NativeConfig
    from bridge.weights.factored_matrix import FactoredMatrix

from bridge.version import __version__

_HOME = {
    "ActivationCache": "bridge.cache.activation_cache",
    "FactoredMatrix": "bridge.weights.factored_matrix",
    "HookPoint": "bridge.hooks.hook_point",
    "NativeConfig": "bridge.native",
    "TransformerBridge": "bridge.bridge",
    "UnknownHookError": "bridge.hooks.names",
    "act_name": "bridge.hooks.act_names",
}

__all__ = [
    "ActivationCache",
    "FactoredMatrix",
    "HookPoint",
    "NativeConfig",
    "TransformerBridge",
    "UnknownHookError",
    "__version__",
    "act_name",
]


def _check_adapters() -> None:
    """AdapterHub's distribution also installs a package called `adapters`."""
    spec = importlib.util.find_spec("adapters")
    ours = spec is not None and spec.origin and os.path.exists(os.path.join(os.path.dirname(spec.origin), "points.py"))
    if not ours:
        found = spec.origin if spec else "nothing"
        raise ImportError(
            f"transformer-bridge needs its own package `adapters`, but Python finds {found}: "
            "AdapterHub's distribution of the same name hides it; uninstall that one or use a separate environment."
        )


_check_adapters()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
