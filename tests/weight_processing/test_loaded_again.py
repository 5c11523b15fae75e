"""Raw weights that are loaded again."""

import copy

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["native", "gpt2"])
def test_norms_without_weights_when_raw_weights_are_loaded_again(kind):
    """There is nothing in them to fold: whether they were folded is seen by what reads them."""
    if kind == "native":
        fields = {
            "n_layers": 2,
            "d_model": 32,
            "n_heads": 4,
            "d_vocab": 61,
            "n_ctx": 9,
            "act_fn": "relu",
            "seed": 0,
        }
        bridge = TransformerBridge.boot_native({**fields, "normalization_type": "LNPre"}).eval()
    else:
        model = tiny("gpt2")
        for block in model.transformer.h:
            block.ln_1 = block.ln_2 = None
            block.ln_1, block.ln_2 = (
                torch.nn.LayerNorm(32, elementwise_affine=False) for _ in range(2)
            )
        model.transformer.ln_f = torch.nn.LayerNorm(32, elementwise_affine=False)
        bridge = TransformerBridge(model)
    raw = copy.deepcopy(bridge.original_model.state_dict())
    called = bridge.cfg.normalization_type
    expected = bridge(TOKENS)
    alone = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    bridge.process_weights(fold_ln=True, **alone)
    processed = copy.deepcopy(bridge.original_model.state_dict())
    raw |= {name: torch.zeros_like(value) for name, value in processed.items() if name not in raw}
    assert (bridge.cfg.processed["fold_ln"], bridge.cfg.normalization_type) == ("done", "LNPre")
    bridge.original_model.load_state_dict(raw)
    assert (bridge.cfg.processed, bridge.cfg.normalization_type) == ({}, called)
    assert torch.equal(bridge(TOKENS), expected)
    bridge.process_weights(fold_ln=True, **alone)
    assert (bridge.cfg.processed["fold_ln"], bridge.cfg.normalization_type) == ("done", "LNPre")
    for name, value in bridge.original_model.state_dict().items():
        torch.testing.assert_close(value, processed[name], atol=1e-6, rtol=1e-5)
    assert bridge.W_in.mean(1).abs().max() < 1e-6
