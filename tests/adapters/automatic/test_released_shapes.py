"""Types in the structure in which they are released, which tiny models of other tests leave out:
sizes alone are small.

Shared keys and per-layer inputs (Gemma 4) are in `test_keys_of_another`.
"""

from __future__ import annotations

from typing import Any

import pytest

from adapters import verify
from benchmarks.models import how_much
from bridge import TransformerBridge
from tests.tiny_models import tiny_model

_HALF = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
#: What a released configuration turns on: dense layers before mixtures, groups of experts, periods
#: of layers of several kinds, a part of each head rotated.
RELEASED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "falcon_h1": {
        "mlp_multipliers": [0.88, 0.58],
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.16, 0.35, 0.5],
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "phi": _HALF,
    "glm": _HALF,
    "nemotron": _HALF,
    "stablelm": _HALF,
}


@pytest.mark.parametrize("model_type", RELEASED)
def test_it_is_offered_in_full_and_proved(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type, **RELEASED[model_type]))
    for name, said in RELEASED[model_type].items():
        assert getattr(bridge.core.config, name) == said, name
    if RELEASED[model_type] is _HALF:
        assert bridge.cfg.rotary_dim == bridge.cfg.d_head // 2
    report = verify(bridge)
    assert how_much(bridge) == "full" and report.passed, f"{bridge.offered()}\n{report}"
