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

#: The classes, by the modules that they are in.
_CLASSES = {
    **{name: name for name in (
        "ActivationCache", "BertNextSentencePrediction", "FactoredMatrix", "HookedEncoder", "HookedEncoderDecoder",
        "HookedTransformer", "HookedTransformerConfig", "SVDInterpreter",
    )},
    **dict.fromkeys(("HookedRootModule", "HookPoint"), "hook_points"),
    **dict.fromkeys(
        ("HookedTransformerKeyValueCache", "HookedTransformerKeyValueCacheEntry"), "past_key_value_caching"
    ),
}  # fmt: skip
_MODULES = {
    **{name: name for name in (
        "components", "evals", "head_detector", "hook_points", "loading_from_pretrained", "past_key_value_caching",
        "patching", "train", "utilities", "utils",
    )},
    "loading": "loading_from_pretrained",
}  # fmt: skip
_OLD_NAMES = {
    "EasyTransformer": "HookedTransformer",
    "EasyTransformerConfig": "HookedTransformerConfig",
    "EasyTransformerKeyValueCache": "HookedTransformerKeyValueCache",
    "EasyTransformerKeyValueCacheEntry": "HookedTransformerKeyValueCacheEntry",
}
#: What to use for names that are left out, in every module of this package.
_NOT_HERE = {
    "factories": "modules are Hugging Face's own: components.MLP(cfg) makes one of a configuration",
    "lit": "there is no connection to LIT",
    "pretrained": "weights are not converted but viewed: HookedTransformer(hf_model).state_dict()",
    "model_bridge": "it is bridge.TransformerBridge",
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


class _SaysWhy(MetaPathFinder):
    """Comes last, where there is no module of a name: an import of what is left out says what to use."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith(f"{__name__}."):
            for word in fullname.split(".")[2:]:
                where = sys.modules.get(fullname.rpartition(".")[0])
                why = _NOT_HERE.get(word) or getattr(where, "NOT_HERE", {}).get(word)
                if why is not None:
                    raise ModuleNotFoundError(
                        f"{where.__name__ if where else __name__} has no {word}: {why}. See docs/migration.md"
                    )


if not any(type(finder).__name__ == "_SaysWhy" for finder in sys.meta_path):
    sys.meta_path.append(_SaysWhy())


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
