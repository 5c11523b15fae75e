"""Scores, pattern and result of a kernel that is no torch function, against transformers' own eager
functions.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from bridge.taps.attention_call import AttentionCall


def tensors(queries: int = 6, keys: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of four heads, keys and values of two, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return query, key, value


def causal(queries: int, keys: int) -> torch.Tensor:
    allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return torch.zeros(2, 1, queries, keys, dtype=torch.float64).masked_fill(
        ~allowed, torch.finfo(torch.float64).min
    )


@pytest.mark.parametrize("queries", [6, 2])
def test_sinks(queries: int) -> None:
    query, key, value = tensors(queries)
    module = SimpleNamespace(
        sinks=torch.randn(4, dtype=torch.float64), num_key_value_groups=2, training=False
    )
    z, pattern = with_sinks(module, query, key, value, causal(queries, 6), scaling=0.3)
    options = {"s_aux": module.sinks, "is_causal": True}
    call = AttentionCall(
        query, key, value, None, 4, scale=0.3, kernel="flash_attention_2", options=options
    )
    scores = call.scores()
    assert scores.shape == (2, 4, queries, 7)  # the last column is the sinks'
    torch.testing.assert_close(call.pattern(scores)[..., :-1], pattern)
    torch.testing.assert_close(call.result(call.pattern(scores)), z.transpose(1, 2))


def test_a_soft_cap() -> None:
    query, key, value = tensors()
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    z, pattern = capped(module, query, key, value, causal(6, 6), scaling=2.0, softcap=1.5)
    options = {"softcap": 1.5, "is_causal": True}
    call = AttentionCall(
        query, key, value, None, 4, scale=2.0, kernel="flash_attention_2", options=options
    )
    assert 1.4 < float(call.scores().max()) < 1.5
    torch.testing.assert_close(call.pattern(call.scores()), pattern)
    torch.testing.assert_close(call.result(call.pattern(call.scores())), z.transpose(1, 2))


def test_the_mask_of_flex_attention() -> None:
    query, key, value = tensors()
    block_mask = create_block_mask(
        lambda b, h, q, k: (k <= q) & (k > q - 3), 2, None, 6, 6, device="cpu"
    )
    call = AttentionCall(query, key, value, block_mask, 4, kernel="flex_attention")
    ones = torch.ones(6, 6, dtype=torch.bool)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=ones.tril() & ones.triu(-2), enable_gqa=True
    )
    torch.testing.assert_close(call.result(call.pattern(call.scores())), expected)


def test_a_mask_that_is_packed_as_the_queries_are() -> None:
    """Multi-query models give a kernel the heads of one position as positions of one head."""
    query, key, value = tensors(queries=1)
    mask = torch.randn(2, 4, 1, 6, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    packed = query.reshape(2, 2, 2, 8), key, value, mask.reshape(2, 2, 2, 6)
    call = AttentionCall(*packed, 4)
    torch.testing.assert_close(
        call.result(call.pattern(call.scores())).reshape(2, 4, 1, 8), expected
    )
