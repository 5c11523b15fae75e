"""The results of all heads, stacked: nothing of the cache is aliased, and the numbers are those of
an einsum.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from tests.conftest import tiny


def by_hand(bridge, cache, layers, choice=slice(None)):
    z = torch.stack([cache["z", layer][:, choice] for layer in range(layers)])
    weight = torch.stack([bridge.blocks[layer].attn.W_O for layer in range(layers)])
    return torch.einsum("lbphd,lhdm->lhbpm", z, weight).flatten(0, 1).detach()


def test_it_is_an_einsum_in_memory_of_its_own(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    before = {name: value.clone() for name, value in cache.items()}
    for layers in (1, 2, 3):
        stack = cache.stack_head_results(layers)
        torch.testing.assert_close(stack, by_hand(bridge, cache, layers), atol=1e-6, rtol=1e-5)
        assert stack.is_contiguous()
        assert not stack.requires_grad
        stack.zero_()
    assert all(torch.equal(cache[name], value) for name, value in before.items())
    assert bool(cache.stack_head_results(3).any())


def test_cached_results_of_one_head_are_copied(tokens):
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=48,
        vocab_size=61,
    )
    bridge = TransformerBridge(LlamaForCausalLM(config).eval())
    names = ["blocks.0.attn.hook_result", "blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]
    _, cache = bridge.run_with_cache(tokens, names_filter=names)
    kept = cache[names[0]].clone()
    cache.stack_head_results(1).zero_()
    assert torch.equal(cache[names[0]], kept)


def test_with_gradients(bridge, tokens):
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(3)]
    with torch.enable_grad():
        _, cache = bridge.run_with_cache(tokens)
        for name in names:
            cache.cache_dict[name] = cache[name].clone().requires_grad_()
        stack = cache.stack_head_results()
        gradients = torch.autograd.grad(stack.sum(), [cache[name] for name in names])
    for layer, gradient in enumerate(gradients):
        expected = bridge.blocks[layer].attn.W_O.sum(-1).expand_as(gradient)
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


def test_positions_and_remainder(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    for choice in (-1, slice(2, 5), [0, 3]):
        stack = cache.stack_head_results(pos_slice=choice)
        torch.testing.assert_close(stack, cache.stack_head_results()[:, :, choice])
    whole = cache.stack_head_results(2, incl_remainder=True)
    torch.testing.assert_close(whole.sum(0), cache["resid_pre", 2])


def test_layers_of_other_shapes_are_stacked(tokens):
    """A cache whose layers hold different precisions has no room in common."""
    bridge = TransformerBridge(tiny("llama"))
    _, cache = bridge.run_with_cache(tokens)
    expected = cache.stack_head_results()
    cache.cache_dict["blocks.1.attn.hook_result"] = torch.einsum(
        "bphd,hdm->bphm", cache["z", 1], bridge.blocks[1].attn.W_O
    ).double()
    assert cache.stack_head_results().dtype == torch.float64
    torch.testing.assert_close(cache.stack_head_results().float(), expected, atol=1e-6, rtol=1e-5)
