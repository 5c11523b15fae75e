"""Scores that are reached inside a module's own code: what is attached is removed, copies are not
tapped.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge import TransformerBridge
from bridge.hooks.context import Scope
from bridge.taps.attention_tap import AttentionTap
from bridge.taps.experts import RouterWatch
from bridge.taps.taps import PatchedFunction, Tap
from tests.adapters.by_hand.families import tiny
from tests.adapters.test_reference import bridge_of
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(5))
#: A case, and a hook point that is reached by replacing a method of one of its modules.
TAPPED = [
    ("gptj", "blocks.0.attn.hook_rot_k"),
    ("gptj", "blocks.1.attn.hook_pattern"),
    ("gpt_neo", "blocks.0.attn.hook_attn_scores"),
    ("mixtral-gqa", "blocks.1.mlp.hook_expert_weights"),
    ("mixtral-gqa", "blocks.1.mlp.experts.2.hook_post"),
    ("gpt_oss-gqa", "blocks.0.mlp.hook_router_logits"),
    ("gpt_oss-gqa", "blocks.1.mlp.experts.2.hook_pre"),
]


def replaced(model: torch.nn.Module) -> list[str]:
    return [
        name
        for module in model.modules()
        for name in ("forward", "_attn")
        if name in module.__dict__
    ]


@pytest.mark.parametrize(("case", "name"), TAPPED)
def test_a_tap_goes_when_nobody_listens(case: str, name: str) -> None:
    bridge = TransformerBridge(tiny(case))
    with torch.no_grad():
        before = bridge(TOKENS)
        with bridge.hooks(fwd_hooks=[(name, lambda x, hook: x * 0)]):
            assert (
                len(replaced(bridge.original_model)) == 2
            )  # the tap, and what keeps compiled code away
            assert not torch.allclose(bridge(TOKENS), before)
        assert not replaced(bridge.original_model)
        assert torch.equal(bridge(TOKENS), before)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize(("case", "name"), TAPPED)
def test_a_copy_made_while_tapped_computes_as_the_original_does(
    case: str, name: str, duplicate
) -> None:
    bridge = TransformerBridge(tiny(case))
    with torch.no_grad():
        before = bridge(TOKENS)
        with bridge.hooks(fwd_hooks=[(name, lambda x, hook: x * 0)]):
            other = duplicate(bridge.original_model)
        assert torch.equal(other(TOKENS).logits, before)


@pytest.mark.parametrize(
    "case",
    [
        "bloom",
        "gptj",
        "gpt_neo",
        "mixtral-gqa",
        "gpt_oss-gqa",
        "qwen2_moe-gqa",
        "opt-no-bias",
        "gemma3-gqa",
    ],
)
def test_hooks_fire_at_each_step_of_generation(case: str) -> None:
    bridge = bridge_of(case) if case == "bloom" else TransformerBridge(tiny(case))
    seen: dict[str, list[int]] = {}
    names = [
        name
        for name, hook in bridge.hook_dict.items()
        if "blocks.1" in name and hook.point.group == "standard"
    ]
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = bridge.original_model.generate(TOKENS[:1], **asked)
    hooks = [
        (name, lambda x, hook: seen.setdefault(hook.name, []).append(x.shape[0])) for name in names
    ]
    with bridge.hooks(fwd_hooks=hooks):
        assert torch.equal(bridge.original_model.generate(TOKENS[:1], **asked), plain)
    assert seen == {name: [1, 1, 1, 1] for name in names}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "blocks.1.attn.hook_pattern"), ("mamba", "blocks.1.mixer.hook_conv")],
)
def test_nothing_stands_in_for_functions_when_a_model_with_hooks_is_dropped(
    kind: str, name: str
) -> None:
    def patched() -> list[PatchedFunction]:
        """What stands in for functions that are looked up by name, in transformers' registry and in
        its modules.
        """
        modules = [
            vars(module)
            for key, module in list(sys.modules.items())
            if key.startswith("transformers.models.")
        ]
        found = [value for names in modules for value in list(names.values())]
        return [
            one
            for one in [*found, *ALL_ATTENTION_FUNCTIONS.values()]
            if isinstance(one, PatchedFunction)
        ]

    gc.collect()
    before = patched()
    bridge = TransformerBridge(tiny_model(kind))
    bridge.add_hook(name, lambda x, hook: x * 0)
    bridge(TOKENS)
    assert len(patched()) > len(before)
    del bridge
    gc.collect()
    assert patched() == before


def test_taps_of_two_kinds_on_one_module_leave_in_any_order() -> None:
    model = tiny("mixtral-gqa")
    router = model.model.layers[0].mlp.gate
    scope, first, second = Scope(), Tap(router, RouterWatch), AttentionTap(router)
    for leaves in ((first, second), (second, first)):
        for tap in (first, second):
            tap.open(scope)
        for tap in leaves:
            tap.close(scope)
        assert "forward" not in router.__dict__
