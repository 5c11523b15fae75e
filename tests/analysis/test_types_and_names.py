"""Sums of several types, names that a part does not have, what a cache says of its embeddings."""

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))


def test_sums_of_several_types():
    """Parts in several types are stacked in the widest of them, as the stream that they add
    up to.
    """
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_proj.double().register_forward_pre_hook(
        lambda module, args: (args[0].double(),)
    )
    for norm in (model.transformer.h[2].ln_1, model.transformer.h[2].ln_2, model.transformer.ln_f):
        norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    bridge = TransformerBridge(model)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    types = [cache[name, 1].dtype for name in ("attn_out", "mlp_out", "resid_post")]
    assert types == [torch.float32, torch.float64, torch.float64]
    stream = cache["resid_post", 2]
    for terms in (
        cache.decompose_resid(),
        cache.get_full_resid_decomposition(),
        cache.stack_head_results(incl_remainder=True),
        cache.stack_neuron_results(-1, incl_remainder=True),
    ):
        assert terms.dtype == torch.float64
        torch.testing.assert_close(terms.sum(0), stream, atol=1e-5, rtol=1e-5)


def test_a_name_that_a_part_does_not_have_is_no_circuit():
    bridge = TransformerBridge(tiny("gpt2"))
    assert bridge.blocks[0].attn.OV.shape == (4, 32, 32)
    for part, name in (
        (bridge.blocks[0].attn, "VO"),
        (bridge.blocks[0].mlp, "OV"),
        (bridge.blocks[0].mlp, "QK"),
    ):
        with pytest.raises(AttributeError, match=f"has no '{name}'"):
            getattr(part, name)


def test_whether_embeddings_are_cached():
    bridge = TransformerBridge(tiny("gpt2"))
    _, cache = bridge.run_with_cache(TOKENS, names_filter=["hook_embed", "hook_pos_embed"])
    assert (cache.has_embed, cache.has_pos_embed) == (True, True)
    _, cache = bridge.run_with_cache(TOKENS, names_filter="blocks.0.hook_resid_pre")
    assert (cache.has_embed, cache.has_pos_embed) == (False, False)
