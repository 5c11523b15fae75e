"""HookedTransformer's names, over the bridge: ``import bridge.legacy as transformer_lens``."""

from __future__ import annotations

import importlib
import sys
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

_CLASSES = {
    "ActivationCache": "ActivationCache",
    "BertNextSentencePrediction": "BertNextSentencePrediction",
    "FactoredMatrix": "FactoredMatrix",
    "HookedEncoder": "HookedEncoder",
    "HookedEncoderDecoder": "HookedEncoderDecoder",
    "HookedTransformer": "HookedTransformer",
    "HookedTransformerConfig": "HookedTransformerConfig",
    "HookedTransformerKeyValueCache": "past_key_value_caching",
    "HookedTransformerKeyValueCacheEntry": "past_key_value_caching",
    "SVDInterpreter": "SVDInterpreter",
}
_MODULES = {
    "evals": "evals",
    "head_detector": "head_detector",
    "hook_points": "hook_points",
    "loading": "loading_from_pretrained",
    "loading_from_pretrained": "loading_from_pretrained",
    "past_key_value_caching": "past_key_value_caching",
    "patching": "patching",
    "train": "train",
    "utilities": "utilities",
    "utils": "utils",
}
_OLD_NAMES = {
    "EasyTransformer": "HookedTransformer",
    "EasyTransformerConfig": "HookedTransformerConfig",
    "EasyTransformerKeyValueCache": "HookedTransformerKeyValueCache",
    "EasyTransformerKeyValueCacheEntry": "HookedTransformerKeyValueCacheEntry",
}
_NOT_HERE = {
    "components": "the blocks are Hugging Face's own modules: model.original_model has them, model.blocks[0].attn.W_Q "
    "and hook points show them in HookedTransformer's shapes",
    "factories": "modules are Hugging Face's own: nothing is built from parts",
    "lit": "there is no connection to LIT",
    "HookedAudioEncoder": "there is no adapter for audio encoders",
}

__all__ = [*_CLASSES, *_MODULES, *_OLD_NAMES]


class _Package(ModuleType):
    """The package: ``HookedTransformer`` is both a module in it and a class; as an attribute it is the class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CLASSES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    name = _OLD_NAMES.get(name, name)
    if name in _CLASSES:
        return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    from bridge.legacy.missing import missing

    raise missing(__name__, name, _NOT_HERE, __all__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
