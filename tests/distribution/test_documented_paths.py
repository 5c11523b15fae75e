"""Names are importable where the documentation has shown them, also after a file has moved."""

from __future__ import annotations

import importlib

import pytest

SHOWN = {
    "adapters.config": ("rotary_values",),
    "adapters.families.gpt_neox": ("gpt_neox",),
    "adapters.families.llama": ("llama",),
    "adapters.families.shapes.llama": ("llama_like",),
    "adapters.norms": ("LAYER_NORM",),
    "adapters.proofs.projections": ("CLAIM",),
    "adapters.registry": ("declaration_for",),
    "adapters.views": ("Call", "View"),
    "bridge.analysis.head_detector": ("HEAD_NAMES", "detect_head"),
    "bridge.analysis.logit_lens": ("head_contributions", "logit_lens"),
    "bridge.analysis.svd": ("SVDInterpreter",),
    "bridge.legacy.hook_points": ("HookPoint",),
    "bridge.pictures.embedding": (),
    "weight_processing.check": ("ProcessingError",),
}


@pytest.mark.parametrize("module", SHOWN)
def test_a_name_is_where_it_was_shown(module: str) -> None:
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in SHOWN[module])
