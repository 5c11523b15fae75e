"""``transformer_lens.components``'s names: the parts of a model, which stand for the Hugging Face model's own."""

from __future__ import annotations

import sys
from types import ModuleType

from bridge.legacy import kinds
from bridge.legacy.HookedTransformer import HookedTransformer as _HookedTransformer  # which makes parts by themselves
from bridge.legacy.kinds import *  # noqa: F403
from bridge.legacy.kinds import Part
from bridge.legacy.missing import explain_missing_name

__all__ = kinds.__all__

#: HookedTransformer has a module for each class; here each of them is the one that holds them all.
_MODULES = (
    "abstract_attention", "attention", "bert_embed", "embed", "grouped_query_attention", "layer_norm",
    "layer_norm_pre", "pos_embed", "rms_norm", "rms_norm_pre", "t5_attention", "transformer_block", "unembed",
)  # fmt: skip
mlps = ModuleType(f"{__name__}.mlps", "``transformer_lens.components.mlps``'s modules.")
mlps.__spec__, mlps.__path__ = kinds.__spec__, []
sys.modules[mlps.__name__] = mlps
for _package, _names in (
    (sys.modules[__name__], _MODULES), (mlps, ("can_be_used_as_mlp", "gated_mlp", "mlp", "moe")),
):  # fmt: skip
    for _name in _names:
        setattr(_package, _name, kinds)
        sys.modules[f"{_package.__name__}.{_name}"] = kinds


__getattr__ = explain_missing_name(__name__)


assert Part.makes_host is not None, _HookedTransformer
