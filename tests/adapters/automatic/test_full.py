"""Types that were offered in part only: all of what a block computes has hook points now, and is
proved.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import verify
from adapters.proofs.feed_forward import CHOICE, GATED
from adapters.proofs.feed_forward import CLAIM as NORMS
from adapters.proofs.scores import SCORES, VALUES
from adapters.proofs.stream import READS
from benchmarks.models import how_much
from bridge import TransformerBridge
from tests.adapters.mutations import mutations, tried
from tests.tiny_models import tiny_model

#: Types, and the options with which a tiny one shows what it does.
FULL: dict[str, dict[str, Any]] = {
    "axk2": {},
    "bitnet": {},
    "dbrx": {},
    "gemma4_text": {},
    "gpt_neox_japanese": {},
    "kimi_linear": {},
    "llama4_text": {},
    "mimo_v2_flash": {},
    "minimax_m3_vl_text": {"swiglu_limit": 1.0},
    "nemotron_h": {},
    "phimoe": {},
}
FIRES = "every hook point fires once, with its declared shape"
#: Of what only they claim, changes, and the claim that each breaks.
CHANGED = {
    ("axk2", "blocks: Attention: pre: input_layernorm without its gate"): READS,
    ("bitnet", "blocks: MLP: norm left out"): GATED,
    ("bitnet", "blocks: MLP: norm: ffn_sub_norm is LN"): NORMS,
    ("bitnet", "blocks: Attention: no Norm of z"): VALUES,
    ("dbrx", "blocks: Attention: clamp left out"): SCORES,
    ("dbrx", "blocks: MoE: router returns logits, weights, indices"): FIRES,
    ("gemma4_text", "blocks: MLP: what it is multiplied with left out"): GATED,
    (
        "gpt_neox_japanese",
        "blocks: layer 1: Attention: output_transform left out",
    ): "resid_pre + attn_out = resid_mid",
    ("kimi_linear", "blocks: layer 1: Attention: not rotary is"): SCORES,
    ("llama4_text", "blocks: MoE: router returns logits, weights, indices"): FIRES,
    ("llama4_text", "blocks: MoE: chosen by probabilities"): CHOICE,
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


def test_an_edit_of_a_norm_goes_through_the_gate_behind_it() -> None:
    """A.X K2: twice the scale is half the norm, of which the gate makes something else; by plain
    torch hooks.
    """
    model = tiny_model("axk2")
    bridge, tokens = TransformerBridge(model), torch.arange(3, 12)[None]
    norm: Any = model.model.layers[1].input_layernorm

    def halved(module: nn.Module, args: tuple[Tensor, ...], made: Tensor) -> Tensor:
        half = norm.norm(args[0]) / 2
        return half * norm.mlp(half).sigmoid()

    handle = norm.register_forward_hook(halved)
    expected = model(tokens).logits
    handle.remove()
    for name, factor in (("hook_scale", 2.0), ("hook_normalized", 0.5)):
        hooks = [(f"blocks.1.ln1.{name}", lambda x, hook, factor=factor: x * factor)]
        torch.testing.assert_close(bridge.run_with_hooks(tokens, fwd_hooks=hooks), expected)
    assert not torch.allclose(expected, bridge(tokens))


@torch.no_grad()
def test_edits_of_a_norm_and_of_the_gate_behind_it_hold_together() -> None:
    model = tiny_model("axk2")
    bridge, tokens = TransformerBridge(model), torch.arange(3, 12)[None]
    norm: Any = model.model.layers[1].input_layernorm

    def both(module: nn.Module, args: tuple[Tensor, ...], made: Tensor) -> Tensor:
        twice = norm.norm(args[0]) * 2
        return twice * (norm.mlp(twice) * 0.5).sigmoid()

    handle = norm.register_forward_hook(both)
    expected = model(tokens).logits
    handle.remove()
    gate, normalized = "blocks.1.ln1.hook_gate", "blocks.1.ln1.hook_normalized"
    edits = [(gate, lambda x, hook: x * 0.5), (normalized, lambda x, hook: x * 2)]
    with bridge.hooks(fwd_hooks=edits):
        logits, cache = bridge.run_with_cache(tokens, names_filter=gate)
    torch.testing.assert_close(logits, expected)
    weight = norm.norm.weight
    seen = norm.mlp(bridge.run_with_cache(tokens)[1][normalized] * 2 * weight) * 0.5
    torch.testing.assert_close(cache[gate], seen)  # what the model computes from, of the two
