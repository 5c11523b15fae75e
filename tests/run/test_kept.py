"""What a run keeps and leaves as it was; masks of any type, on any device."""

import gc
import weakref

import pytest
import torch

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny as adapters_tiny
from tests.conftest import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
NEW = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}


@torch.no_grad()
def test_what_was_recorded_is_not_written_to_by_a_later_point_of_its_place():
    """In T5 the stream between and what the MLP reads are one tensor, and an edit of the second is
    made in place.
    """
    bridge = TransformerBridge(adapters_tiny("t5"))
    names = ["encoder.1.hook_resid_mid", "encoder.1.hook_mlp_in"]
    clean = bridge.run_with_cache(TOKENS, names_filter=names)[1]
    with bridge.hooks([(names[1], lambda x, hook: x * 0.5)]):
        for wanted in (names, names[:1]):
            cache = bridge.run_with_cache(TOKENS, names_filter=wanted)[1]
            assert torch.equal(cache[names[0]], clean[names[0]])
    assert torch.equal(clean[names[0]], clean[names[1]])


def test_a_compiled_block_is_as_it_was_after_it_was_passed_over():
    bridge = TransformerBridge(tiny("gpt2"))
    residual = bridge(TOKENS, stop_at_layer=1)
    expected = bridge(residual, start_at_layer=1)
    block = bridge.original_model.transformer.h[0]
    block.compile(backend="eager")
    own = block._compiled_call_impl
    assert torch.equal(bridge(residual, start_at_layer=1), expected)
    assert block._compiled_call_impl is own


@pytest.mark.parametrize("name", ["blocks.1.ln1.hook_scale", "blocks.1.ln1.hook_normalized"])
@torch.no_grad()
def test_a_cache_of_a_norm_does_not_keep_the_stream(name):
    """What could be computed later from larger tensors is computed in the run, unless everything is
    kept anyway.
    """
    bridge = TransformerBridge(tiny("gpt2"))
    alive = []
    norm = bridge.original_model.transformer.h[1].ln_1
    norm.register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0])))
    _, cache = bridge.run_with_cache(TOKENS, names_filter=name)
    gc.collect()
    assert alive[0]() is None
    _, whole = bridge.run_with_cache(TOKENS)
    assert torch.equal(whole[name], cache[name])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16, torch.float64]
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_type_of_a_mask_is_no_matter(implementation, dtype):
    bridge = TransformerBridge(tiny("llama", implementation))
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    name = "blocks.1.attn.hook_attn_scores"
    logits, cache = bridge.run_with_cache(TOKENS, attention_mask=mask, names_filter=name)
    again, other = bridge.run_with_cache(TOKENS, attention_mask=mask.to(dtype), names_filter=name)
    assert torch.equal(logits, again)
    assert torch.equal(cache[name], other[name])
    assert torch.equal(
        bridge.generate(TOKENS, attention_mask=mask.to(dtype), **NEW),
        bridge.generate(TOKENS, attention_mask=mask, **NEW),
    )
    loss = bridge(TOKENS, attention_mask=mask.to(dtype), return_type="loss")
    assert torch.equal(loss, bridge(TOKENS, attention_mask=mask, return_type="loss"))


def test_a_mask_is_brought_to_the_model():
    """What the model is given lies where its input goes: here on a device that holds no numbers."""
    bridge = TransformerBridge(tiny("llama"))
    bridge.original_model.to("meta")
    seen = []

    def stop(module, args, kwargs):
        seen.append(kwargs)
        raise RuntimeError("seen")

    bridge.original_model.register_forward_pre_hook(stop, with_kwargs=True)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    for given in (mask, mask.bool(), mask.float(), mask[:, None, None].expand(2, 1, 7, 7).float()):
        with pytest.raises(RuntimeError, match="seen"):
            bridge(TOKENS, attention_mask=given)
        assert {value.device.type for value in seen.pop().values()} == {"meta"}
