"""Models whose own forward does not name ``use_cache``, and passes it on to their decoder."""

import inspect

import pytest
import torch

from adapters.inputs import accepted_by
from bridge import TransformerBridge
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("kind", ["granitemoe", "llava"])
def test_they_are_continued_from_their_cache(kind):
    model = tiny_model(kind, "causal" if kind == "granitemoe" else "image_text")
    assert "use_cache" not in inspect.signature(type(model).forward).parameters
    assert "use_cache" in accepted_by(model)
    bridge = TransformerBridge(model)
    tokens = torch.randint(10, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens).logits
        logits, past = bridge(tokens[:, :5], return_type="logits_and_cache")
        later, past = bridge(tokens[:, 5:], past_key_values=past, return_type="logits_and_cache")
    assert past.get_seq_length() == 7
    torch.testing.assert_close(torch.cat([logits, later], 1), whole, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(bridge(tokens, use_cache=False), whole)


def test_a_model_that_does_not_pass_it_on_does_not_take_it():
    model = tiny_model("bert", "masked")
    assert "use_cache" not in accepted_by(model)
    with pytest.raises(TypeError, match="'use_cache' is an argument of neither"):
        TransformerBridge(model)(torch.tensor([[3, 4]]), use_cache=True)
