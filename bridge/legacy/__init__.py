"""HookedTransformer's names, over the bridge: ``import bridge.legacy as transformer_lens``."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.cache.activation_cache import ActivationCache as ActivationCache
    from bridge.legacy.BertNextSentencePrediction import BertNextSentencePrediction as BertNextSentencePrediction
    from bridge.legacy.HookedEncoder import HookedEncoder as HookedEncoder
    from bridge.legacy.HookedEncoderDecoder import HookedEncoderDecoder as HookedEncoderDecoder
    from bridge.legacy.HookedTransformer import HookedTransformer as HookedTransformer
    from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig as HookedTransformerConfig
    from bridge.weights.factored_matrix import FactoredMatrix as FactoredMatrix

#: The modules whose names are also those of classes, which stand for them here.
_CLASSES = (
    "ActivationCache", "BertNextSentencePrediction", "FactoredMatrix", "HookedEncoder", "HookedEncoderDecoder",
    "HookedTransformer", "HookedTransformerConfig", "SVDInterpreter",
)  # fmt: skip
_MODULES = (
    "components", "evals", "head_detector", "hook_points", "loading_from_pretrained", "past_key_value_caching",
    "patching", "train", "utilities", "utils",
)  # fmt: skip
_CACHES = ("KeyValueCache", "KeyValueCacheEntry")
#: Where each name is: a module, and the name in it ("": the module itself).
_HOME = {
    **{name: (name, name) for name in _CLASSES},
    **{name: (name, "") for name in _MODULES},
    "loading": ("loading_from_pretrained", ""),
    **{name: ("hook_points", name) for name in ("HookedRootModule", "HookPoint")},
    **{f"{whose}Transformer{name}": ("past_key_value_caching", f"HookedTransformer{name}")
       for name in _CACHES for whose in ("Hooked", "Easy")},
    "EasyTransformer": ("HookedTransformer", "HookedTransformer"),
    "EasyTransformerConfig": ("HookedTransformerConfig", "HookedTransformerConfig"),
}  # fmt: skip

__all__ = [*_HOME]


class _Package(ModuleType):
    """The package: ``HookedTransformer`` is both a module in it and a class; as an attribute it is the class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CLASSES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


class _MissingNames(MetaPathFinder):
    """Comes last, where there is no module of a name: an import of what is left out says what to use."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        where, _, name = fullname.rpartition(".")
        if where.startswith(__name__):
            from bridge.legacy.missing import why_not

            if why := why_not(where, name):
                raise ModuleNotFoundError(why)


if not any(type(finder).__name__ == "_MissingNames" for finder in sys.meta_path):
    sys.meta_path.append(_MissingNames())


def __getattr__(name: str) -> Any:
    if name in _HOME:
        where, attribute = _HOME[name]
        module = importlib.import_module(f"{__name__}.{where}")
        return getattr(module, attribute) if attribute else module
    from bridge.legacy.missing import explain_missing_name

    return explain_missing_name(__name__)(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
