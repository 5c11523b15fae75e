"""A cache that is pickled or copied: it holds tensors and names, never the model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from bridge import ActivationCache, TransformerBridge


def loaded(cache: ActivationCache) -> ActivationCache:
    return pickle.loads(pickle.dumps(cache))


def test_it_holds_no_parameter(bridge: TransformerBridge, tokens: torch.Tensor) -> None:
    _, cache = bridge.run_with_cache(tokens)
    with torch.no_grad():
        for parameter in bridge.parameters():
            parameter.fill_(12345.678)
    written = pickle.dumps(cache)
    marked = torch.tensor(12345.678).numpy().tobytes()
    assert marked not in written and marked in pickle.dumps(bridge)


def test_it_holds_no_more_than_what_was_asked_for() -> None:
    bridge = TransformerBridge.boot_native(
        {
            "n_layers": 1,
            "d_model": 256,
            "n_heads": 4,
            "d_head": 64,
            "d_vocab": 10,
            "n_ctx": 64,
            "act_fn": "gelu",
        }
    )
    _, cache = bridge.run_with_cache(
        torch.ones(2, 64, dtype=torch.long), names_filter="blocks.0.hook_resid_pre"
    )
    part = ActivationCache({name: value[..., :8] for name, value in cache.items()}, bridge)
    assert len(pickle.dumps(part)) < 0.2 * len(pickle.dumps(cache))
    assert torch.equal(loaded(part)["resid_pre", 0], cache["resid_pre", 0][..., :8])


def test_it_is_read_under_every_name(bridge: TransformerBridge, tokens: torch.Tensor) -> None:
    _, cache = bridge.run_with_cache(tokens)
    again = loaded(cache)
    assert list(again) == list(cache)
    for key in ("embed", ("q", 1), ("resid_post", -1), ("scale", 0, "ln1"), ("pattern", 0)):
        assert torch.equal(again[key], cache[key])
    for alias, name in bridge.names.aliases.items():
        assert (alias in again) == (name in cache)
    assert "blocks.0.hook_nothing" not in again
    with pytest.raises(KeyError, match="no hook point has this name"):
        again["blocks.0.hook_nothing"]
    with pytest.raises(KeyError, match="it was not asked for"):
        again["blocks.0.attn.hook_result"]
    assert again.apply_slice_to_batch_dim(0)["q", 1].shape == cache["q", 1].shape[1:]
    assert torch.equal(loaded(again)["embed"], cache["embed"])


def test_analyses_ask_for_the_model(bridge: TransformerBridge, tokens: torch.Tensor) -> None:
    _, cache = bridge.run_with_cache(tokens)
    again = loaded(cache)
    with pytest.raises(ValueError, match=r"cache\.model = bridge"):
        again.decompose_resid()
    with pytest.raises(ValueError, match=r"cache\.model = bridge"):
        again.to("cpu", move_model=True)
    again.model = bridge
    assert torch.equal(again.decompose_resid(), cache.decompose_resid())


def test_copies_keep_the_model(bridge: TransformerBridge, tokens: torch.Tensor) -> None:
    _, cache = bridge.run_with_cache(tokens)
    for make in (copy.copy, copy.deepcopy):
        assert make(cache).model is bridge
    other = copy.deepcopy(cache)
    other["embed"].zero_()
    assert cache["embed"].any()


def test_moving_keeps_every_value(bridge: TransformerBridge, tokens: torch.Tensor) -> None:
    _, cache = bridge.run_with_cache(tokens)
    before = {name: value.clone() for name, value in cache.items()}
    assert cache.to("cpu", move_model=True) is cache
    assert all(torch.equal(cache[name], value) for name, value in before.items())
