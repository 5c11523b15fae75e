"""Modules that compute something else than their class, or that their configuration says: what is
read from them is right, or refused.
"""

import copy

import pytest
import torch
from torch import nn

from bridge import TransformerBridge
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))


def replaced(module, factor=1.5):
    """Replace a module's forward on the instance."""
    old = module.forward
    module.forward = lambda *args, **kwargs: old(*args, **kwargs) * factor


def test_embeddings_with_a_replaced_forward():
    model = tiny_model("llama")
    replaced(model.model.embed_tokens)
    bridge = TransformerBridge(model)
    assert torch.equal(bridge.W_E[TOKENS], model.model.embed_tokens(TOKENS))


def test_a_bias_that_is_computed():
    model = tiny_model("gpt2")
    for block in model.transformer.h:
        replaced(block.attn.c_proj)
    bridge = TransformerBridge(model)
    torch.testing.assert_close(
        bridge.blocks[0].attn.b_O, model.transformer.h[0].attn.c_proj.bias * 1.5
    )
    _, cache = bridge.run_with_cache(TOKENS)
    total = cache.get_full_resid_decomposition(expand_neurons=False).sum(0)
    torch.testing.assert_close(total, cache["resid_post", -1], atol=1e-4, rtol=1e-4)


def test_a_bias_inside_of_a_container():
    model = tiny_model("llama")
    for block in model.model.layers:
        block.self_attn.o_proj = nn.Sequential(nn.Linear(32, 32), block.self_attn.o_proj)
    bridge = TransformerBridge(model)
    with pytest.raises(TypeError, match="the bias of a Sequential is not available"):
        _ = bridge.b_O
    _, cache = bridge.run_with_cache(TOKENS)
    with pytest.raises(TypeError, match="the bias of a Sequential is not available"):
        cache.get_full_resid_decomposition(expand_neurons=False)


def test_a_bias_that_a_model_lacks_cannot_be_written_to():
    bridge = TransformerBridge(tiny_model("llama"))
    bias = bridge.blocks[0].attn.b_O
    assert not bias.any()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        bias[:] = 1.0


class Clamped(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-0.01, 0.01)


def test_neurons_of_a_layer_that_is_not_linear():
    model = tiny_model("llama")
    for block in model.model.layers:
        block.mlp.down_proj.__class__ = Clamped
    _, cache = TransformerBridge(model).run_with_cache(TOKENS)
    with pytest.raises(TypeError, match="the results of neurons are not available"):
        cache.stack_neuron_results(layer=1)


@pytest.mark.parametrize("new", ["forward", "class"])
def test_nothing_is_taken_through_another_norm_than_the_declared(new):
    model = tiny_model("llama")
    bridge = TransformerBridge(model)
    if new == "class":
        model.model.norm = nn.LayerNorm(32)
    else:
        replaced(model.model.norm)
    _, cache = bridge.run_with_cache(TOKENS)
    with pytest.raises(ValueError, match="does not compute the RMS norm that its adapter declares"):
        cache.logit_attrs(cache.decompose_resid(), 3)
    with pytest.raises(ValueError, match="does not compute the RMS norm that its adapter declares"):
        cache.apply_ln_to_stack(cache.decompose_resid())


def test_norms_in_other_types_are_the_declared_ones():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        bridge = TransformerBridge(tiny_model("llama").to(dtype))
        _, cache = bridge.run_with_cache(TOKENS)
        assert cache.logit_attrs(cache.decompose_resid(), 3).isfinite().all()


def test_blocks_that_were_added():
    model = tiny_model("llama")
    bridge = TransformerBridge(model)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    with pytest.raises(RuntimeError, match="1 more blocks than when the bridge was made"):
        bridge.run_with_cache(TOKENS)


def test_an_edit_that_another_hook_would_lose():
    model = tiny_model("llama")
    bridge = TransformerBridge(model)
    output = model.model.layers[0].self_attn.o_proj
    output.register_forward_hook(lambda module, args, output: output * 2)
    hooks = [("blocks.0.attn.hook_result", lambda x, hook: x)]
    with pytest.raises(
        RuntimeError, match="of a Linear anew, and a torch hook changes this output"
    ):
        bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)


def test_heads_of_the_modules_and_not_of_a_changed_configuration():
    model = tiny_model("bloom")
    model.config.n_head = 2
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred
    assert bridge.cfg.n_heads == model.transformer.h[0].self_attention.num_heads == 4


def test_key_heads_of_the_modules():
    model = tiny_model("llama")
    model.config.num_key_value_heads = 4
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred and bridge.cfg.n_key_value_heads == 2


def test_factors_of_the_modules():
    model = tiny_model("granite")
    assert not TransformerBridge(model).offered().inferred
    model.model.layers[0].residual_multiplier = 0.9
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred
    _, cache = bridge.run_with_cache(TOKENS)
    torch.testing.assert_close(
        cache.decompose_resid().sum(0), cache["resid_post", -1], atol=1e-4, rtol=1e-4
    )


def test_fields_that_a_configuration_has_besides_those_of_its_class():
    model = tiny_model("bert", "masked")
    model.config.num_key_value_heads = 2
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred and bridge.cfg.n_key_value_heads is None
    assert bridge.run_with_cache(TOKENS)[1]["k", 0].shape == (2, 7, 4, 8)
