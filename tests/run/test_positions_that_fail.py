"""Padding before a token in a model whose own code fails where positions are given."""

import pytest
import torch

from bridge import TransformerBridge
from tests.tiny_models import tiny_model


def test_reformer_refuses_padding_in_front_by_name_and_takes_it_behind():
    model = tiny_model("reformer")
    bridge = TransformerBridge(model)
    tokens = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match=r"Reformer.*use padding_side=.right"):
        bridge(tokens, attention_mask=mask)
    behind = mask.flip(1)
    with torch.no_grad():
        torch.manual_seed(0)  # of its hashes
        ours = bridge(tokens, attention_mask=behind)
        torch.manual_seed(0)
        assert torch.equal(ours, model(tokens, attention_mask=behind).logits)
