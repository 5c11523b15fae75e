"""Writes that torch does not count: through `.data`, numpy, dlpack, fused optimizers, vectors,
pruning, and in inference mode. No answer mixes what was with what is.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)

from bridge import TransformerBridge
from bridge.lens import TunedLens
from tests.conftest import tiny

R, Z = "blocks.0.hook_resid_post", "blocks.1.attn.hook_z"


@pytest.fixture(params=["llama", "gpt2"])
def bridge(request) -> TransformerBridge:
    return TransformerBridge(tiny(request.param))


def output(bridge: TransformerBridge, part: str) -> nn.Module:
    name = f"blocks.1.{'attn.hook_z' if part == 'attn' else 'mlp.hook_post'}"
    return bridge.original_model.get_submodule(bridge.hook_dict[name].point.site.path)


def fused(bridge, part):
    weights = [*bridge.original_model.parameters()]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, lr=0.3, fused=True).step()


def through_data(bridge, part):
    output(bridge, part).weight.data.mul_(1.5)


def one_number(bridge, part):
    output(bridge, part).weight.data[3, 5] += 1


def one_row(bridge, part):
    output(bridge, part).weight.data[2] = 0


def through_numpy(bridge, part):
    output(bridge, part).weight.detach().numpy()[:, 1] = 0


def through_dlpack(bridge, part):
    torch.from_dlpack(output(bridge, part).weight.detach()).data.mul_(2)


def from_a_vector(bridge, part):
    weights = [*bridge.original_model.parameters()]
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(weights) * 1.5, weights)


def pruned(bridge, part):
    prune.random_unstructured(output(bridge, part), "weight", amount=0.5)


def reparametrised(bridge, part):
    parametrizations.spectral_norm(output(bridge, part))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrised(bridge, part):
    parametrize.register_parametrization(output(bridge, part), "weight", Doubled())


WRITES = [
    fused,
    through_data,
    one_number,
    one_row,
    through_numpy,
    through_dlpack,
    from_a_vector,
    pruned,
    reparametrised,
    parametrised,
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_terms_of_changed_weights_are_refused(bridge, tokens, write, part):
    def ask(cache):
        if part == "attn":
            return cache.stack_head_results()
        return cache.get_neuron_results(1)

    _, cache = bridge.run_with_cache(tokens)
    before = ask(cache)
    torch.testing.assert_close(ask(cache), before)
    write(bridge, part)
    with pytest.raises(ValueError, match="were changed since the run"):
        ask(cache)


@pytest.mark.parametrize("write", [fused, from_a_vector])
def test_what_reads_the_end_is_refused(bridge, tokens, write):
    _, cache = bridge.run_with_cache(tokens)
    terms, reading = cache.decompose_resid(), bridge.lens(tokens)
    write(bridge, "attn")
    with pytest.raises(ValueError, match="were changed since the run"):
        cache.logit_attrs(terms, 5)
    with pytest.raises(ValueError, match="were changed since this reading"):
        reading.stack()


@pytest.mark.parametrize("write", [fused, from_a_vector])
def test_the_record_of_processing_is_true_after_a_write(tokens, write):
    bridge = TransformerBridge(tiny("llama"))
    bridge.process_weights()
    assert bridge.cfg.processed["fold_ln"] == "done"
    assert bridge.cfg.normalization_type == "RMSPre"
    write(bridge, "attn")
    assert bridge.cfg.normalization_type == "RMS"
    assert bridge.cfg.processed.get("fold_ln") != "done"


def test_models_of_inference_mode(tokens):
    with torch.inference_mode():
        bridge = TransformerBridge(tiny("llama"))
        _, cache = bridge.run_with_cache(tokens)
        before = cache.stack_head_results().clone()
        assert torch.equal(cache.stack_head_results(), before)
        output(bridge, "attn").weight.mul_(1.5)
        with pytest.raises(ValueError, match="were changed since the run"):
            cache.stack_head_results()


def test_a_norms_epsilon_is_that_of_the_run(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    norm = bridge.original_model.get_submodule(
        bridge.hook_dict["blocks.1.ln1.hook_scale"].point.site.path
    )
    name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, name, 0.5)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.ln1\.hook_scale cannot be computed"):
        cache["scale", 1, "ln1"]


@pytest.mark.parametrize("source", ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_rot_q"])
def test_a_cache_is_not_computed_from_what_its_user_wrote(tokens, source):
    bridge = TransformerBridge(tiny("llama"))
    with torch.no_grad():
        _, whole = bridge.run_with_cache(tokens)
        _, cache = bridge.run_with_cache(tokens)
    cache[source].numpy().fill(0)
    late = "blocks.1.ln1.hook_scale" if "resid" in source else "blocks.1.attn.hook_pattern"
    with pytest.raises(RuntimeError, match="cannot be computed any more"):
        cache[late]
    other = "blocks.0.attn.hook_pattern"
    assert torch.equal(cache[other], whole[other])


# --- In hooks: what is written counts, however it is written.


def with_data(x):
    x.data.mul_(0.5)


def with_numpy(x):
    x.detach().numpy()[...] *= 0.5


@pytest.mark.parametrize("write", [with_data, with_numpy])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        R,
        Z,
        "blocks.1.ln1.hook_scale",
        "blocks.1.ln1.hook_normalized",
        "blocks.1.attn.hook_result",
        "blocks.1.attn.hook_pattern",
        "ln_final.hook_scale",
    ],
)
def test_writes_in_hooks_count(bridge, tokens, name, grad, write):
    def written(x, hook):
        write(x)

    with torch.set_grad_enabled(grad):
        expected = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 0.5)])
        found = bridge.run_with_hooks(tokens, fwd_hooks=[(name, written)])
        plain = bridge(tokens)
        read = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: None)])
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, plain, atol=1e-5)
    torch.testing.assert_close(read, plain)


@pytest.mark.parametrize("write", [with_data, with_numpy])
@pytest.mark.parametrize("name", [R, Z, "blocks.1.mlp.hook_post", "blocks.1.attn.hook_pattern"])
def test_writes_to_gradients_count(bridge, tokens, name, write):
    def gradient_of(hook):
        model = bridge.original_model
        model.zero_grad()
        bridge.run_with_hooks(tokens, bwd_hooks=[(name, hook)], return_type="loss").backward()
        return model.get_input_embeddings().weight.grad.clone()

    expected = gradient_of(lambda gradient, hook: gradient * 0.5)
    torch.testing.assert_close(gradient_of(lambda gradient, hook: write(gradient)), expected)
    assert not torch.allclose(gradient_of(lambda gradient, hook: None), expected, atol=1e-7)


def _write_late(bridge, tokens, write):
    with torch.no_grad(), bridge.trace(tokens) as run:
        value = run[R]
        run[Z].mean()
        write(value)


@pytest.mark.parametrize("write", [with_data, with_numpy])
def test_late_writes_in_a_trace_are_errors(tokens, write):
    from bridge.trace.coroutine import OutOfStepError

    bridge = TransformerBridge(tiny("llama"))
    with pytest.raises(OutOfStepError, match=R):
        _write_late(bridge, tokens, write)
    with torch.no_grad(), bridge.trace(tokens) as run:
        write(run[R])
        logits = run.logits
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(R, lambda x, hook: x * 0.5)])
    torch.testing.assert_close(logits, expected)


def test_a_layer_that_gives_no_gradient_gives_zeros(tokens):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x @ weight.T

        @staticmethod
        def backward(ctx, gradient):
            return None, None

    model = tiny("llama")
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: Stop.apply(x, layer.weight)
    bridge, name, seen = TransformerBridge(model), "blocks.1.mlp.hook_post", []
    with bridge.hooks(bwd_hooks=[(name, lambda gradient, hook: seen.append(gradient))]):
        bridge(tokens, return_type="loss").backward()
    assert len(seen) == 1
    assert not seen[0].any()
    _, cache = bridge.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    assert not cache[f"{name}_grad"].any()


def test_a_tuned_lens_knows_its_unembedding(tmp_path):
    bridge = TransformerBridge.boot_embedded()
    lens = TunedLens.fit(bridge, ["Mary and John went to the store."], verbose=False)
    lens.save(tmp_path)
    TunedLens.load(tmp_path, bridge)
    other = copy.deepcopy(bridge.original_model)
    other.get_output_embeddings().weight.data[7, 20] += 0.01
    with pytest.raises(ValueError, match="another unembedding"):
        TunedLens.load(tmp_path, TransformerBridge(other, bridge.tokenizer))
