"""Attention sinks: what is shown is without them, what is computed is with them (values are in
by_hand).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from tests.adapters.by_hand.families import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(6))


@pytest.fixture
def bridge() -> TransformerBridge:
    return TransformerBridge(tiny("gpt_oss-gqa"))


def test_with_padding_the_pattern_is_the_models_own(bridge: TransformerBridge) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        own = bridge.original_model(
            TOKENS, attention_mask=mask, position_ids=positions, output_attentions=True
        )
        logits, cache = bridge.run_with_cache(TOKENS, attention_mask=mask)
    assert torch.equal(logits, own.logits)
    for layer in range(2):
        assert torch.equal(cache["pattern", layer], own.attentions[layer])
        assert cache["pattern", layer].shape == cache["attn_scores", layer].shape == (2, 4, 7, 7)
        assert (cache["attn_scores", layer][0, ..., :3] == -torch.inf).all()


def test_scores_are_those_of_queries_and_keys(bridge: TransformerBridge) -> None:
    """The model takes each row's largest from them before the softmax."""
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    for layer in range(2):
        q, k = (cache[f"blocks.{layer}.attn.hook_rot_{letter}"] for letter in "qk")
        right = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / 8**0.5
        scores = cache["attn_scores", layer]
        seen = scores != -torch.inf
        torch.testing.assert_close(scores[seen], right[seen], atol=1e-5, rtol=1e-5)
        sink = bridge.original_model.model.layers[layer].self_attn.sinks.view(-1, 1, 1)
        shares = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)
        torch.testing.assert_close(cache["pattern", layer], shares[..., :-1])
        assert cache["pattern", layer].sum(-1).mean() < 0.9


def test_a_head_that_may_see_nothing_gives_all_to_its_sink(bridge: TransformerBridge) -> None:
    def forbid(scores: Tensor, hook: object) -> Tensor:
        scores[:, 1] = -torch.inf
        return scores

    with torch.no_grad(), bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", forbid)]):
        logits, cache = bridge.run_with_cache(TOKENS)
    assert not cache["pattern", 1][:, 1].any() and not cache["z", 1][:, :, 1].any()
    assert cache["z", 1][:, :, 0].any() and logits.isfinite().all()


def test_a_pattern_is_used_as_it_is_written(bridge: TransformerBridge) -> None:
    with (
        torch.no_grad(),
        bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda x, hook: x * 3)]),
    ):
        _, cache = bridge.run_with_cache(TOKENS)
    values = cache["v", 0].repeat_interleave(2, dim=2)
    torch.testing.assert_close(
        cache["z", 0], torch.einsum("bhqk,bkhd->bqhd", cache["pattern", 0], values)
    )
