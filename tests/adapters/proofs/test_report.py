"""What a proof cannot compare is no proof: nothing that did not run, has another shape or raises is
passed over.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from adapters import verify
from adapters.proofs.evidence import Check, Findings
from adapters.proofs.feed_forward import CLAIM as NORMS
from adapters.proofs.mechanics import ATTRIBUTED
from adapters.proofs.stream import LOGITS
from bridge import TransformerBridge
from tests.conftest import tiny

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def found(findings: Findings, name: str = "claim") -> Check:
    (check,) = [check for check in findings.checks() if check.name == name]
    return check


@pytest.mark.parametrize(
    ("seen", "expected", "said"),
    [
        (None, ROWS, "blocks.0: it did not run"),
        (ROWS, None, "blocks.0: it did not run"),
        (ROWS, ROWS[:1], r"blocks.0: shape [2, 2] for [1, 2]"),
        (ROWS, ROWS.clone().fill_(torch.inf), "blocks.0: one is infinite where the other is not"),
        (ROWS, ROWS * 1.5, "blocks.0: differs by 3.3e-01, relatively"),
    ],
)
def test_what_is_not_equal_does_not_hold(
    seen: Tensor | None, expected: Tensor | None, said: str
) -> None:
    findings = Findings(1e-5)
    assert findings.equal("claim", "blocks.1", ROWS, ROWS.clone())
    assert not findings.equal("claim", "blocks.0", seen, expected)
    check = found(findings)
    assert not check.passed and said in check.detail


def test_what_raises_does_not_hold() -> None:
    findings = Findings(1e-5)

    def raises() -> None:
        raise KeyError("blocks.7")

    findings.attempt("claim", raises)
    assert not found(findings).passed and "KeyError: 'blocks.7'" in found(findings).detail


def test_nothing_is_equal_to_nothing() -> None:
    findings = Findings(1e-5)
    assert findings.equal("claim", "blocks.0", ROWS[:0], ROWS[:0]) and found(findings).passed


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("rotary_dim", "cfg does not say how many dimensions are rotated"),
        ("rotary_base", "cfg does not say the base of the rotation"),
    ],
)
def test_a_rotation_of_which_cfg_says_nothing_is_not_proved(fact: str, said: str) -> None:
    bridge = TransformerBridge(tiny("llama"))
    setattr(bridge.cfg, fact, None)
    wrong = [check.detail for check in verify(bridge).checks if not check.passed]
    assert any(said in detail for detail in wrong)


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        (
            "d_mlp",
            7,
            "not [batch pos d_mlp]: d_mlp is 7 (config_values={'d_mlp': 48} says another)",
        ),
        (
            "act_fn",
            None,
            "act_fn=None is no function that is known: say config_values={'act_fn': ...}",
        ),
    ],
)
def test_what_is_to_be_said_of_an_mlp_is_named_by_its_key(
    fact: str, value: object, said: str
) -> None:
    bridge = TransformerBridge(tiny("llama"))
    setattr(bridge.cfg, fact, value)
    assert said in str(verify(bridge))


def test_a_module_that_is_no_norm_is_not_proved() -> None:
    model = tiny("llama")
    model.model.layers[1].input_layernorm.forward = torch.tanh
    (check,) = [check for check in verify(TransformerBridge(model)).checks if check.name == NORMS]
    assert (
        not check.passed
        and "model.layers.1.input_layernorm computes no norm that is known" in check.detail
    )


@pytest.mark.parametrize("by_position", [False, True])
def test_what_is_added_to_the_logits_is_not_proved_where_it_is_not_declared(
    by_position: bool,
) -> None:
    model = tiny("llama")

    def add(
        module: torch.nn.Module, args: object, output: CausalLMOutputWithPast
    ) -> CausalLMOutputWithPast:
        assert output.logits is not None
        places = torch.arange(output.logits.shape[1])[:, None] if by_position else 1.0
        output.logits = output.logits + places * torch.linspace(1, 2, output.logits.shape[-1])
        return output

    model.register_forward_hook(add)
    assert [check.name for check in verify(TransformerBridge(model)).failed] == [LOGITS, ATTRIBUTED]
