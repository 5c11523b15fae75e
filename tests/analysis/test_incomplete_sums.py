"""Terms that do not sum to the stream of the run are reported: something else changed it."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from bridge import TransformerBridge
from bridge.analysis.residual import IncompleteSumWarning


@pytest.fixture
def granite():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    factors = {"residual_multiplier": 0.5, "embedding_multiplier": 2.0}
    config = GraniteConfig(vocab_size=50, num_attention_heads=4, **sizes, **factors)
    return TransformerBridge(GraniteForCausalLM(config).eval())


TOKENS = torch.arange(14).reshape(2, 7)


def decompositions(cache):
    yield lambda: cache.decompose_resid()
    yield lambda: cache.decompose_resid(layer=1)
    yield lambda: cache.decompose_resid(layer=1, mlp_input=True, pos_slice=-1)
    yield lambda: cache.get_full_resid_decomposition(expand_neurons=False)


def check_warned(cache):
    for decomposed in decompositions(cache):
        with pytest.warns(IncompleteSumWarning, match="do not sum to blocks"):
            decomposed()


def test_terms_of_an_unchanged_run_sum(granite):
    cache = granite.run_with_cache(TOKENS)[1]
    for decomposed in decompositions(cache):
        decomposed()  # a warning is an error here


def test_a_factor_changed_after_wrapping(granite):
    granite.original_model.model.layers[0].residual_multiplier = 0.7
    check_warned(granite.run_with_cache(TOKENS)[1])


def test_a_forward_replaced_on_a_block(granite):
    block = granite.original_model.model.layers[0]
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.5
    check_warned(granite.run_with_cache(TOKENS)[1])


def test_an_edit_of_the_stream(granite):
    with granite.hooks([("blocks.0.hook_resid_post", lambda x, hook: x * 2)]):
        cache = granite.run_with_cache(TOKENS)[1]
    check_warned(cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounding_is_no_reason_to_warn(granite, dtype):
    granite.original_model.to(dtype)
    cache = TransformerBridge(granite.original_model).run_with_cache(TOKENS)[1]
    for decomposed in decompositions(cache):
        decomposed()
