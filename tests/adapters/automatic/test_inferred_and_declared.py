"""An inferred adapter and a declared one of the same class give the same points, with the same
tensors.
"""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
import torch

from adapters import verify
from adapters.config import ModelConfig
from bridge import TransformerBridge
from tests.adapters.test_verify_all import ALIKE, OTHER, USUAL, tiny

#: What a family declares of its models' habits, or of what a run of theirs does not show.
NOT_MEASURED = {
    "_model",
    "default_prepend_bos",
    "rotary_base",
    "rotary_base_local",
    "use_local_attn",
    "window_size",
    "attn_types",
    "rotary_adjacent_pairs",
    "scale_attn_by_inverse_layer_idx",
    "attn_scores_soft_cap",
    "use_attn_scale",
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


def both(case: str) -> tuple[TransformerBridge, TransformerBridge]:
    """A bridge of what is declared for a case's model, and one of what is inferred for it."""
    model = tiny(case)
    declared = TransformerBridge(model)
    inferred = TransformerBridge(model, automatic="always")
    assert inferred.offered().inferred and not declared.offered().inferred
    return declared, inferred


CASES = [case for case in (*USUAL, *OTHER, *ALIKE) if not case.startswith("t5")]


@pytest.mark.parametrize("case", CASES)
def test_inferred_points_are_those_of_the_declaration(case: str) -> None:
    declared, inferred = both(case)
    assert set(inferred.hook_dict) == set(declared.hook_dict)
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        caches = [
            each.run_with_cache(tokens, names_filter=list(each.hook_dict))[1]
            for each in (declared, inferred)
        ]
    for name, hook in declared.hook_dict.items():
        assert inferred.hook_dict[name].point.aliases == hook.point.aliases, name
        torch.testing.assert_close(caches[1][name], caches[0][name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "case", ["gpt2", "llama-gqa", "gpt_neox", "gemma2-gqa", "bert", "phi3-gqa"]
)
def test_inferred_facts_are_those_of_the_declaration(case: str) -> None:
    declared, inferred = both(case)
    for field in fields(ModelConfig):
        if field.name not in NOT_MEASURED:
            assert getattr(inferred.cfg, field.name) == getattr(declared.cfg, field.name), (
                field.name
            )


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_what_is_inferred_verifies(case: str) -> None:
    report = verify(both(case)[1])
    assert report.passed, str(report)
