"""Weights are proved by the activations that they make: each that is wrong is named."""

from __future__ import annotations

import pytest
import torch

from adapters.proofs.evidence import Findings, randomized_run, some_tokens
from adapters.proofs.facts import WEIGHTS as CLAIM
from adapters.proofs.facts import prove_weights
from adapters.weights import Weights
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny

#: The weights of a layer, and the hook point that each is proved by.
NAMES = {
    "attn.W_Q": "attn.hook_q",
    "attn.b_Q": "attn.hook_q",
    "attn.W_K": "attn.hook_k",
    "attn.b_K": "attn.hook_k",
    "attn.W_V": "attn.hook_v",
    "attn.b_V": "attn.hook_v",
    "attn.W_O": "attn.W_O",
    "attn.b_O": "attn.W_O",
    "mlp.W_in": "mlp.hook_pre",
    "mlp.b_in": "mlp.hook_pre",
    "mlp.W_out": "mlp.W_out",
    "mlp.b_out": "mlp.W_out",
}


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_and_bias_is_proved(name: str) -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    evidence = randomized_run(bridge, *some_tokens(bridge, 2, 9))
    weights = Weights(bridge.architecture, bridge.original_model, bridge.cfg)
    right = Findings(2e-5)
    prove_weights(evidence, right, weights)
    assert all(check.passed for check in right.checks())
    get = weights.getters[f"blocks.1.{name}"]
    weights.getters[f"blocks.1.{name}"] = lambda: torch.zeros_like(get())
    wrong = Findings(2e-5)
    prove_weights(evidence, wrong, weights)
    (check,) = wrong.checks()
    assert check.name == CLAIM and not check.passed
    assert check.detail.startswith(f"blocks.1.{NAMES[name]}: differs by")


def test_the_bias_of_a_gate() -> None:
    bridge = TransformerBridge(tiny("llama-mqa-bias"))
    gate = bridge.original_model.get_submodule("model.layers.1.mlp.gate_proj")
    assert (
        torch.equal(bridge.blocks[1].mlp.b_gate, gate.bias)
        and bridge.b_gate.shape == bridge.b_in.shape
    )
    assert not hasattr(
        TransformerBridge(tiny("llama-gqa")).blocks[1].mlp, "b_gate"
    )  # its gate has none
    evidence = randomized_run(bridge, *some_tokens(bridge, 2, 9))
    weights = Weights(bridge.architecture, bridge.original_model, bridge.cfg)
    weights.getters["blocks.1.mlp.b_gate"] = lambda: torch.zeros_like(gate.bias)
    findings = Findings(2e-5)
    prove_weights(evidence, findings, weights)
    (check,) = findings.checks()
    assert not check.passed and check.detail.startswith("blocks.1.mlp.hook_pre: differs by")
