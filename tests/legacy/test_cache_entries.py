"""`HookedTransformerKeyValueCacheEntry` by itself."""

import pytest
import torch

from bridge.legacy import (
    HookedTransformerConfig,
    HookedTransformerKeyValueCache,
    HookedTransformerKeyValueCacheEntry,
)


def config(**more):
    fields = {
        "n_layers": 2,
        "d_model": 32,
        "n_ctx": 32,
        "d_head": 8,
        "n_heads": 4,
        "d_vocab": 9,
        "attn_only": True,
    }
    return HookedTransformerConfig(**fields | more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_empty_entry(dtype):
    entry = HookedTransformerKeyValueCacheEntry.init_cache_entry(
        config(dtype=dtype, n_key_value_heads=2), device="cpu", batch_size=3
    )
    for kept in (entry.past_keys, entry.past_values):
        assert kept.shape == (3, 0, 2, 8)
        assert kept.dtype == dtype


def test_what_is_appended_is_kept_until_it_is_frozen():
    torch.manual_seed(0)
    cache = HookedTransformerKeyValueCache.init_cache(config(), batch_size=2)
    keys, values = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)
    entry = cache[1]
    first = entry.append(keys[:, :3], values[:, :3])
    assert torch.equal(first[0], keys[:, :3]) and torch.equal(first[1], values[:, :3])
    found = entry.append(keys[:, 3:], values[:, 3:])
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    assert torch.equal(entry.past_keys, keys) and torch.equal(cache[1].past_values, values)
    assert cache[0].past_keys.shape[1] == 0
    cache.freeze()
    found = entry.append(keys[:, :1], values[:, :1])
    assert torch.equal(found[0], torch.cat([keys, keys[:, :1]], 1))
    assert torch.equal(entry.past_keys, keys) and torch.equal(entry.past_values, values)


@pytest.mark.unchecked
@pytest.mark.parametrize("shape", [(1, 3, 4, 8), (2, 3, 2, 8), (2, 3, 4), (2, 3, 4, 4)])
def test_what_does_not_fit(shape):
    entry = HookedTransformerKeyValueCacheEntry.init_cache_entry(config(), batch_size=2)
    with pytest.raises(ValueError, match=r"both must be \[2, new_pos, 4, 8\]"):
        entry.append(torch.ones(shape), torch.ones(shape))
    with pytest.raises(ValueError, match="keys and values have shapes"):
        entry.append(torch.ones(2, 3, 4, 8), torch.ones(2, 2, 4, 8))
