"""Types that were offered in part only: all of what a block computes has hook points now, and is proved."""

from __future__ import annotations

from typing import Any

import pytest

from adapters import verify
from adapters.proofs.feed_forward import CHOICE, GATED
from adapters.proofs.norms import CLAIM as NORMS
from adapters.proofs.scores import SCORES, VALUES
from benchmarks.models import how_much
from bridge import TransformerBridge
from tests.adapters.mutations import mutations, tried
from tests.tiny_models import tiny_model

#: Types, and the options with which a tiny one shows what it does.
FULL: dict[str, dict[str, Any]] = {
    "bitnet": {}, "gemma4_text": {}, "gpt_neox_japanese": {}, "kimi_linear": {}, "mimo_v2_flash": {},
    "minimax_m3_vl_text": {"swiglu_limit": 1.0}, "nemotron_h": {}, "phimoe": {},
}  # fmt: skip
#: Of what only they claim, changes, and the claim that each breaks.
CHANGED = {
    ("bitnet", "blocks: MLP: norm left out"): GATED,
    ("bitnet", "blocks: MLP: norm: ffn_sub_norm is LN"): NORMS,
    ("bitnet", "blocks: Attention: no norm of z"): VALUES,
    ("gemma4_text", "blocks: MLP: what it is multiplied with left out"): GATED,
    ("gpt_neox_japanese", "blocks: layer 1: Attention: o_bias left out"): "resid_pre + attn_out = resid_mid",
    ("kimi_linear", "blocks: layer 1: Attention: not rotary is"): SCORES,
    ("minimax_m3_vl_text", "cfg.act_fn = 'silu'"): GATED,
    ("phimoe", "blocks: MoE: margin times 2"): CHOICE,
    ("phimoe", "blocks: MoE: chosen by probabilities"): CHOICE,
}


@pytest.mark.parametrize("model_type", FULL)
def test_it_is_offered_in_full_and_proved(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type, **FULL[model_type]))
    report = verify(bridge)
    assert how_much(bridge) == "full" and report.passed, f"{bridge.offered()}\n{report}"


@pytest.mark.parametrize(("model_type", "name"), CHANGED)
def test_a_wrong_declaration_of_it_is_refused(model_type: str, name: str) -> None:
    model = tiny_model(model_type, **FULL[model_type])
    report = tried(model, next(each for each in mutations(model) if each.name == name))
    assert not isinstance(report, Exception)
    assert CHANGED[model_type, name] in {check.name for check in report.failed}, str(report)
