"""HookedTransformer's names, over the bridge: ``import bridge.legacy as transformer_lens``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bridge.legacy import table

if TYPE_CHECKING:
    from bridge.cache import ActivationCache as ActivationCache
    from bridge.legacy.HookedEncoder import HookedEncoder as HookedEncoder
    from bridge.legacy.HookedEncoder import HookedEncoderDecoder as HookedEncoderDecoder
    from bridge.legacy.HookedTransformer import HookedTransformer as HookedTransformer
    from bridge.legacy.HookedTransformerConfig import (
        HookedTransformerConfig as HookedTransformerConfig,
    )
    from bridge.legacy.model_bridge import TransformerBridge as TransformerBridge
    from bridge.weights import FactoredMatrix as FactoredMatrix

__all__ = [*table.NAMES["package"]]


class _Package(ModuleType):
    """The package: ``HookedTransformer`` is both a module in it and a class; as an attribute it is
    the class.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and ":" in table.NAMES["package"].get(name, ""):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
if not any(type(finder).__name__ == "Tabled" for finder in sys.meta_path):
    sys.meta_path.append(table.Tabled())


__getattr__ = table.named(__name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
