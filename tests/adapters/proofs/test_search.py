"""What of an inferred declaration does not hold is left out by name, with the reason, and nothing
else is.
"""

from __future__ import annotations

import pytest
import transformers
from torch import Tensor

from adapters.proofs import mechanics
from adapters.proofs.proofs import Proof
from adapters.views import Call, View
from bridge import TransformerBridge
from tests.adapters.test_verify import change
from tests.conftest import tiny
from tests.tiny_models import config_for, tiny_model, tiny_of


class WritesAnother(View):
    identity = False

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new * 1.1


class Fails(View):
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        raise ValueError("no such view\nand more")


class WritesNothing(View):
    identity = False

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return x


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification", "HubertModel"])
def test_edits_without_effect_are_found(name: str) -> None:
    """Where blocks run alone (text), and where all run in one pass (images, sound)."""
    cls = getattr(transformers, name)
    bridge = TransformerBridge(tiny_of(cls, config_for(cls)), cache_declaration=False)
    dead = {"blocks.0.hook_mlp_out", "blocks.1.mlp.hook_post", "blocks.1.mlp.hook_pre"}
    for point in dead:
        change(bridge, point, view=WritesNothing())
    found = Proof(bridge).run().not_offered
    assert found == dict.fromkeys(dead, "an edit changes nothing")


def test_what_holds_is_held() -> None:
    assert Proof(TransformerBridge(tiny("llama"))).run().not_offered == {}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bamba", "qwen2_moe", "gemma2"])
def test_of_what_holds_nothing_is_tried_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hook points are tried together: halves of them are, and theirs again, where something
    raised an error.
    """
    raised: list[str] = []
    # Proofs say nothing of errors that they go round: where these become words is the one place
    # that sees all.
    monkeypatch.setattr(mechanics, "one_line", lambda error: raised.append(str(error)) or "")
    assert Proof(TransformerBridge(tiny_model(family))).run().not_offered == {}
    assert raised == []


def test_wrong_points_are_found_among_all() -> None:
    bridge = TransformerBridge(tiny("llama"))
    change(bridge, "blocks.0.hook_mlp_out", view=WritesAnother())
    change(bridge, "blocks.1.attn.hook_q", view=View())
    change(bridge, "blocks.2.hook_attn_out", view=Fails())
    training = bridge.train().training
    found = Proof(bridge).run()
    assert bridge.training == training
    assert set(found.not_offered) == {
        "blocks.0.hook_mlp_out",
        "blocks.1.attn.hook_q",
        "blocks.2.hook_attn_out",
    }
    assert (
        found.not_offered["blocks.2.hook_attn_out"]
        == "looking there ends in an error (ValueError: no such view and more)"
    )
    assert found.not_offered["blocks.0.hook_mlp_out"].startswith(
        "writing back what was read changes the logits by "
    )
    rows, length = found.tokens.shape
    said = f"its shape is ({rows}, {length}, 32), not [batch pos n_heads d_head]"
    assert found.not_offered["blocks.1.attn.hook_q"] == said
