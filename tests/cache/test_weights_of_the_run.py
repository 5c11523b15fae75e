"""What is computed from a cache and weights is computed with those of the run, or refused by
name.
"""

import copy
import pickle

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import tiny
from tests.tiny_models import tiny_model


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
    pattern = bridge.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")[1][
        "pattern", 1
    ]
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


@pytest.mark.parametrize(
    ("kind", "task", "path", "read"),
    [
        (
            "gpt2",
            "causal",
            "transformer.ln_f",
            lambda cache: cache.accumulated_resid(apply_ln=True),
        ),
        (
            "gemma2",
            "causal",
            "model.layers.0.post_attention_layernorm",
            lambda cache: cache.stack_head_results(post_norms=True),
        ),
        (
            "gemma2",
            "causal",
            "model.layers.0.post_feedforward_layernorm",
            lambda cache: cache.stack_neuron_results(-1, post_norms=True),
        ),
        ("bert", "masked", "bert.embeddings.LayerNorm", lambda cache: cache.decompose_resid()),
        (
            "bert",
            "masked",
            "bert.encoder.layer.0.output.LayerNorm",
            lambda cache: cache.stack_head_results(),
        ),
        (
            "albert",
            "masked",
            "albert.encoder.embedding_hidden_mapping_in",
            lambda cache: cache.decompose_resid(),
        ),
    ],
)
def test_terms_behind_a_changed_norm_or_projection_are_refused(kind, task, path, read):
    bridge, tokens = TransformerBridge(tiny_model(kind, task)), torch.tensor([[3, 4, 5]])
    _, cache = bridge.run_with_cache(tokens)
    before, sliced = read(cache), cache.apply_slice_to_batch_dim([0])
    with torch.no_grad():
        bridge.original_model.get_submodule(path).weight.mul_(2)
    for old in (cache, sliced):
        with pytest.raises(ValueError, match=r"the weights at .* were changed since the run"):
            read(old)
    assert not torch.equal(read(bridge.run_with_cache(tokens)[1]), before)


def test_the_bias_of_heads_that_are_cached(bridge, tokens):
    bridge.set_use_attn_result(True)
    _, cache = bridge.run_with_cache(tokens)
    heads = cache.stack_head_results()
    with torch.no_grad():
        bridge.original_model.transformer.h[1].attn.c_proj.bias.add_(1)
    assert torch.equal(cache.stack_head_results(), heads)
    with pytest.raises(ValueError, match=r"the weights at .* were changed since the run"):
        cache.get_full_resid_decomposition(expand_neurons=False)


ADAPTERS = {
    "r": 2,
    "target_modules": ["c_proj"],
    "modules_to_save": ["ln_f"],
    "fan_in_fan_out": True,
}


def adapted():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("gpt2"), LoraConfig(**ADAPTERS))
    model.add_adapter("other", LoraConfig(**ADAPTERS))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def scale(model):
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
@pytest.mark.parametrize(
    "switch",
    [
        scale,
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.disable_adapter_layers(),
    ],
)
def test_other_adapters_than_those_of_the_run_are_refused(tokens, switch):
    bridge = TransformerBridge(adapted())
    _, cache = bridge.run_with_cache(tokens)
    before = cache.stack_head_results(), cache.stack_neuron_results(-1)
    switch(bridge.original_model)
    for read in (cache.stack_head_results, lambda: cache.stack_neuron_results(-1)):
        with pytest.raises(ValueError, match="adapters switched"):
            read()
    again = bridge.run_with_cache(tokens)[1]
    assert not torch.equal(again.stack_head_results(), before[0])


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
def test_a_run_without_adapters_is_read_without_them(tokens):
    bridge = TransformerBridge(adapted())
    with bridge.original_model.disable_adapter():
        _, cache = bridge.run_with_cache(tokens)
        reading = bridge.lens(tokens)
        heads, logits = cache.stack_head_results(), reading.logits(0)
    for read in (
        cache.stack_head_results,
        lambda: cache.accumulated_resid(apply_ln=True),
        lambda: reading.logits(0),
    ):
        with pytest.raises(ValueError, match=r"since (the run|this reading)"):
            read()
    with bridge.original_model.disable_adapter():
        assert torch.equal(cache.stack_head_results(), heads) and torch.equal(
            reading.logits(0), logits
        )
