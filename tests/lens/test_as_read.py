"""A reading is decoded under the hooks and with the weights that it was made with, or refused by
name.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.lens import Lens, TunedLens
from tests.conftest import tiny
from tests.tiny_models import tiny_model


def halve(act, hook):
    return act * 0.5


@pytest.fixture
def bridge():
    return TransformerBridge(tiny("gpt2"))


@pytest.mark.parametrize("name", ["blocks.0.hook_resid_post", "ln_final.hook_normalized"])
def test_inside_the_hooks_the_end_is_the_model(bridge, tokens, name):
    with torch.no_grad(), bridge.hooks(fwd_hooks=[(name, halve)]):
        reading = bridge.lens(tokens)
        torch.testing.assert_close(reading.logits(-1), bridge(tokens))
        assert reading.top(3).tokens.shape[-1] == 3


def test_hooks_of_blocks_have_done_their_work(bridge, tokens):
    with torch.no_grad():
        with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_post", halve)]):
            right, reading = bridge(tokens), bridge.lens(tokens)
        torch.testing.assert_close(reading.logits(-1), right)


def test_hooks_behind_the_blocks_that_are_gone_or_new_are_refused(bridge, tokens):
    name = "ln_final.hook_normalized"
    with torch.no_grad():
        plain = bridge.lens(tokens)
        with bridge.hooks(fwd_hooks=[(name, halve)]):
            right, reading = bridge(tokens), bridge.lens(tokens)
            with pytest.raises(
                ValueError, match=r"the hooks at ln_final\.hook_normalized have changed"
            ):
                plain.logits(-1)
        with pytest.raises(
            ValueError, match=r"the hooks at ln_final\.hook_normalized have changed"
        ):
            reading.divergence()
        with bridge.hooks(fwd_hooks=[(name, halve)]):
            torch.testing.assert_close(reading.logits(-1), right)
        torch.testing.assert_close(plain.logits(-1), bridge(tokens))
    assert not any(point.listeners for point in bridge.hook_dict.values())


@pytest.mark.parametrize("kind", ["normed", "raw"])
def test_changed_weights_are_refused(bridge, tokens, kind):
    with torch.no_grad():
        reading = bridge.lens(tokens, kind=kind)
        reading.logits(0)
        bridge.original_model.lm_head.weight.mul_(0.5)
        with pytest.raises(ValueError, match="the weights behind the blocks were changed"):
            reading.logits(0)
        bridge.lens(tokens, kind=kind).logits(0)


def test_a_lens_that_was_trained_since_is_refused(bridge, tokens):
    tuned = TunedLens(3, 32)
    with torch.no_grad():
        reading = bridge.lens(tokens, kind=tuned)
        reading.logits(0)
        for parameter in tuned.parameters():
            parameter.data += 0.1
        with pytest.raises(ValueError, match="or the lens"):
            reading.logits(0)


def test_another_soft_cap_is_refused(tokens):
    bridge = TransformerBridge(tiny_model("gemma2"))
    with torch.no_grad():
        reading = bridge.lens(tokens)
        torch.testing.assert_close(reading.logits(-1), bridge(tokens))
        bridge.original_model.config.final_logit_softcapping = 0.5
        with pytest.raises(ValueError, match="a number of the configuration"):
            reading.logits(-1)


def test_a_picture_is_named_after_its_lens():
    bridge = TransformerBridge.boot_embedded()
    tuned = TunedLens(bridge.cfg.n_layers, bridge.cfg.d_model)
    for kind, title in (
        ("normed", "Logit lens"),
        (Lens(bridge), "Logit lens"),
        (tuned, "Tuned lens"),
    ):
        reading = bridge.lens("Mary and John", kind)
        assert repr(reading.draw()) == f"Picture('{title}')"
        chosen = reading.draw(chosen=[" Mary", " John"])
        assert repr(chosen) == f"Picture('{title} of chosen tokens')"
