"""No operation lets a row attend to padding, and a mean over rows counts none."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.interventions import Add, Clamp, Mean, Scale, Set, Zero
from tests.conftest import tiny

SCORES, PATTERN = "blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"
POINT = "blocks.0.hook_resid_post"


@pytest.fixture(params=["gpt2", "llama"])
def bridge(request) -> TransformerBridge:
    return TransformerBridge(tiny(request.param))


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, slice]:
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    own = slice(0, 5) if side == "right" else slice(3, 8)
    mask[1] = 0
    mask[1, own] = 1
    tokens[1, mask[1] == 0] = 0
    return tokens, mask, own


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [SCORES, PATTERN])
@pytest.mark.parametrize(
    "operation",
    [
        Set(0.3),
        Zero(),
        Add(0.5),
        Clamp(0.0, 0.1),
        Scale(0.5),
        Set(0.3, positions=-1),
        Set(0.3, keys=[0, -1]),
        Set(0.3, heads=1),
    ],
)
def test_a_row_attends_to_no_padding(bridge, side, name, operation):
    tokens, mask, own = padded(side)
    hooks = [(name, operation)]
    found = bridge.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask)[1, own]
    alone = bridge.run_with_hooks(tokens[1:, own], fwd_hooks=hooks)[0]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)
    if name == PATTERN or not isinstance(operation, Add):  # the softmax sees no common term
        assert not torch.allclose(found, bridge(tokens[1:, own])[0], atol=1e-4)


def test_a_mean_over_rows_is_of_tokens_at_one_position(bridge):
    seen = {}
    for side in ("left", "right"):
        tokens, mask, own = padded(side)
        if side == "left":
            first = tokens[1, own]
        tokens[1, own] = first
        _, cache = bridge.run_with_cache(tokens, attention_mask=mask, names_filter=POINT)
        after = [(POINT, Mean("rows"))]
        with bridge.hooks(fwd_hooks=after):
            _, edited = bridge.run_with_cache(tokens, attention_mask=mask, names_filter=POINT)
        long, short = cache[POINT][0], cache[POINT][1, own]
        expected = long.clone()
        expected[:5] = (long[:5] + short) / 2
        torch.testing.assert_close(edited[POINT][0], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(edited[POINT][1, own], expected[:5], rtol=0, atol=1e-5)
        seen[side] = edited[POINT][0]
    torch.testing.assert_close(seen["left"], seen["right"], rtol=0, atol=1e-4)


def test_a_mean_over_rows_of_patterns_with_padding_is_refused(bridge):
    tokens, mask, _ = padded("left")
    with pytest.raises(ValueError, match="rows with padding"):
        bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Mean("rows"))], attention_mask=mask)
    bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Mean("rows"))])
