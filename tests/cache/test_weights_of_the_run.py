"""What is computed from a cache and weights is computed with those of the run, or refused by name."""

import copy
import pickle

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import tiny


@pytest.fixture
def bridge():
    return TransformerBridge(tiny("gpt2"))


def halve_output(bridge, part):
    module = bridge.original_model.transformer.h[1]
    weight = (module.attn if part == "attn" else module.mlp).c_proj.weight
    with torch.no_grad():
        weight *= 0.5


def train(bridge, part):
    optimizer = torch.optim.SGD(bridge.parameters(), lr=0.1)
    bridge(torch.tensor([[3, 4, 5]]), return_type="loss").backward()
    optimizer.step()


def process(bridge, part):
    bridge.process_weights()


def replace(bridge, part):
    module = bridge.original_model.transformer.h[1]
    part = module.attn if part == "attn" else module.mlp
    part.c_proj = copy.deepcopy(part.c_proj)


@pytest.mark.parametrize("change", [halve_output, train, process, replace])
@pytest.mark.parametrize("what", ["heads", "neurons", "decomposition"])
def test_changed_weights_are_refused(bridge, tokens, change, what):
    results = {
        "heads": lambda cache: cache.stack_head_results(),
        "neurons": lambda cache: cache.get_neuron_results(1),
        "decomposition": lambda cache: cache.get_full_resid_decomposition(expand_neurons=False),
    }[what]
    _, cache = bridge.run_with_cache(tokens)
    copied, sliced = copy.copy(cache), cache.apply_slice_to_batch_dim([0])
    before = results(cache)
    torch.testing.assert_close(results(copied), before)
    change(bridge, "mlp" if what == "neurons" else "attn")
    for old in (cache, copied, sliced):
        with pytest.raises(ValueError, match="were changed since the run"):
            results(old)
    again = bridge.run_with_cache(tokens)[1]
    assert results(again).isfinite().all()


def test_patterns_and_cached_results_stay(bridge, tokens):
    name = "blocks.1.attn.hook_result"
    _, kept = bridge.run_with_cache(tokens, names_filter=name)
    _, cache = bridge.run_with_cache(tokens)
    pattern = bridge.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")[1]["pattern", 1]
    result = kept[name].clone()
    halve_output(bridge, "attn")
    torch.testing.assert_close(cache["pattern", 1], pattern)
    assert torch.equal(kept[name], result)


def test_other_layers_and_other_devices_are_no_change(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    before = cache.get_neuron_results(0)
    halve_output(bridge, "mlp")
    torch.testing.assert_close(cache.get_neuron_results(0), before)
    bridge.original_model.double().float()
    torch.testing.assert_close(cache.get_neuron_results(0), before)


def test_a_pickled_cache_takes_the_model_that_it_is_given(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    before = cache.get_neuron_results(1)
    loaded = pickle.loads(pickle.dumps(cache))
    loaded.model = bridge
    torch.testing.assert_close(loaded.get_neuron_results(1), before)
    halve_output(bridge, "mlp")
    with pytest.raises(ValueError, match="were changed since the run"):
        loaded.get_neuron_results(1)


@pytest.mark.parametrize("end", ["lm_head", "transformer.ln_f"])
def test_logits_of_an_old_stream_are_refused_when_what_makes_them_was_changed(bridge, tokens, end):
    _, cache = bridge.run_with_cache(tokens)
    sliced, terms = cache.apply_slice_to_batch_dim([0]), cache.decompose_resid()
    before = cache.logit_attrs(terms, 5)
    halve_output(bridge, "attn")  # of a layer: the stream's end is the run's
    assert torch.equal(cache.logit_attrs(terms, 5), before)
    with torch.no_grad():
        bridge.original_model.get_submodule(end).weight.mul_(2)
    for old, of_it in ((cache, terms), (sliced, terms[:, :1])):
        with pytest.raises(ValueError, match=r"the weights at .* were changed since the run"):
            old.logit_attrs(of_it, 5)
    again = bridge.run_with_cache(tokens)[1]
    assert not torch.equal(again.logit_attrs(again.decompose_resid(), 5), before)
