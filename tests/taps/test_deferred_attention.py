"""A cache leaves attention to its kernel: scores and patterns are computed when they are
asked for.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, StaticCache

from adapters.observe.observe import SOFTMAXES
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny as any_tiny
from tests.conftest import FAMILIES, tiny

LAST = "blocks.2.attn."


class Softmaxes(TorchFunctionMode):
    """Counts how often a softmax was computed in full."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in SOFTMAXES
        return func(*args, **(kwargs or {}))


def shown(bridge, tokens, name, **inputs):
    """What a hook at one point sees: there the layer computes its scores in full."""
    seen = []
    bridge.run_with_hooks(
        tokens, fwd_hooks=[(name, lambda x, hook: seen.append(x.clone()) or None)], **inputs
    )
    return seen[0]


def test_caching_everything_changes_no_bit(bridge, tokens):
    with Softmaxes() as softmaxes:
        logits, cache = bridge.run_with_cache(tokens)
        assert softmaxes.count == 0
        assert torch.equal(logits, bridge(tokens))
        for layer in range(3):
            assert cache["pattern", layer] is cache["pattern", layer]
        assert softmaxes.count == 3


@pytest.mark.parametrize("name", ["hook_attn_scores", "hook_pattern"])
def test_it_is_what_the_models_own_eager_attention_computes(bridge, tokens, name):
    _, cache = bridge.run_with_cache(tokens)
    assert torch.equal(cache[LAST + name], shown(bridge, tokens, LAST + name))
    _, positions = bridge.run_with_cache(
        tokens, pos_slice=slice(2, 5)
    )  # computed in the run, of these queries alone
    torch.testing.assert_close(
        positions[LAST + name], cache[LAST + name][:, :, 2:5], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_with_padding(family, side):
    bridge = TransformerBridge(tiny(family))
    tokens = torch.randint(0, 61, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    _, cache = bridge.run_with_cache(tokens, attention_mask=mask)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    _, alone = bridge.run_with_cache(tokens[:1, real])
    assert torch.allclose(cache["pattern", 2][:1, :, real, real], alone["pattern", 2], atol=1e-6)
    assert cache["pattern", 2].isfinite().all()


def test_after_a_past(bridge, tokens):
    past = DynamicCache(config=bridge.original_model.config)
    bridge(tokens[:, :6], past_key_values=past)
    _, cache = bridge.run_with_cache(tokens[:, 6:], past_key_values=past)
    _, whole = bridge.run_with_cache(tokens)
    assert torch.allclose(cache["pattern", 2], whole["pattern", 2][:, :, 6:], atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_a_past_that_later_runs_write_into(tokens, mode):
    bridge = TransformerBridge(tiny("llama"))
    past = StaticCache(config=bridge.original_model.config, max_cache_len=12)
    with mode():
        caches = [
            bridge.run_with_cache(part, past_key_values=past)[1]
            for part in tokens.split([5, 1, 3], dim=1)
        ]
        _, whole = bridge.run_with_cache(tokens)
    assert torch.allclose(
        caches[0]["pattern", 2][..., :5], whole["pattern", 2][:, :, :5, :5], atol=1e-6
    )
    assert torch.allclose(
        caches[1]["pattern", 2][..., :6], whole["pattern", 2][:, :, 5:6, :6], atol=1e-6
    )
    assert torch.allclose(
        caches[2]["pattern", 2][..., :9], whole["pattern", 2][:, :, 6:], atol=1e-6
    )


def test_edited_queries_are_what_it_is_computed_from(tokens):
    bridge = TransformerBridge(tiny("llama"))
    with bridge.hooks(fwd_hooks=[(LAST + "hook_rot_q", lambda q, hook: q * 0)]):
        _, cache = bridge.run_with_cache(tokens)
    rows = torch.tril(torch.ones(9, 9)) / torch.arange(1, 10)[:, None]
    assert torch.allclose(cache[LAST + "hook_pattern"], rows.expand(2, 4, 9, 9))


def test_an_edited_pattern_is_kept_as_edited(bridge, tokens):
    with bridge.hooks(fwd_hooks=[(LAST + "hook_pattern", lambda pattern, hook: pattern * 0.5)]):
        _, cache = bridge.run_with_cache(tokens)
    assert torch.allclose(cache[LAST + "hook_pattern"].sum(-1), torch.tensor(0.5))


def test_autocast_is_the_runs(bridge, tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = bridge.run_with_cache(tokens)
        expected = shown(bridge, tokens, "blocks.0.attn.hook_attn_scores")
    assert torch.equal(cache["attn_scores", 0], expected)
    _, plain = bridge.run_with_cache(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        later = plain["attn_scores", 0]
    assert torch.equal(later, bridge.run_with_cache(tokens)[1]["attn_scores", 0])
    assert not torch.equal(later, expected.to(later.dtype))


def test_with_gradients_on_it_holds_no_graph(bridge, tokens):
    with torch.enable_grad():
        logits, cache = bridge.run_with_cache(tokens)
        assert logits.requires_grad
        assert not cache["pattern", 2].requires_grad


def test_a_position_bias_holds_no_graph(tokens):
    bridge = TransformerBridge(any_tiny("t5"))
    name = "encoder.1.attn.hook_pattern"
    with torch.enable_grad():
        _, cache = bridge.run_with_cache(
            tokens, decoder_input_ids=tokens, names_filter=["hook_embed", name]
        )
    kept = cache._values[name].attention
    assert not any(x.requires_grad for x in (kept.query, kept.key, kept.mask))
    assert torch.equal(cache[name], shown(bridge, tokens, name, decoder_input_ids=tokens))


def test_dropout_takes_no_random_numbers_when_asked(bridge, tokens):
    bridge.train()
    _, cache = bridge.run_with_cache(tokens)
    state = torch.get_rng_state()
    assert torch.allclose(cache["pattern", 2].sum(-1), torch.tensor(1.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_inference_mode(bridge, tokens):
    with torch.inference_mode():
        _, cache = bridge.run_with_cache(tokens)
    assert torch.equal(cache["pattern", 1], bridge.run_with_cache(tokens)[1]["pattern", 1])


@pytest.mark.parametrize("name", ["hook_attn_scores", "hook_pattern"])
def test_inference_mode_does_not_count_changes(tokens, name):
    bridge = TransformerBridge(tiny("llama"))
    expected = bridge.run_with_cache(tokens)[1]
    with torch.inference_mode():
        _, cache = bridge.run_with_cache(tokens)
        for changed in ("blocks.2.hook_resid_pre", LAST + "hook_rot_q", LAST + "hook_rot_k"):
            cache[changed].mul_(2)
        assert torch.equal(cache[LAST + name], expected[LAST + name])
        assert torch.equal(cache["blocks.2.ln1.hook_scale"], expected["blocks.2.ln1.hook_scale"])


def test_asked_for_in_inference_mode_it_is_still_of_its_run(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    with torch.inference_mode():
        values = [cache["pattern", 1], cache["scale", 1, "ln1"]]
    assert not any(value.is_inference() for value in values)


def test_what_it_is_made_from_was_changed(tokens):
    bridge = TransformerBridge(tiny("llama"))
    _, cache = bridge.run_with_cache(tokens)
    cache[LAST + "hook_rot_k"].mul_(2)
    with pytest.raises(
        RuntimeError, match=r"blocks\.2\.attn\.hook_pattern cannot be computed any more"
    ):
        cache[LAST + "hook_pattern"]


def test_in_the_hook_of_another_run(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    expected = bridge.run_with_cache(tokens)[1]["pattern", 1]
    seen = []

    def look(pattern, hook):
        seen.append(cache["pattern", 1])

    bridge.run_with_hooks(tokens[:, :4], fwd_hooks=[(LAST + "hook_pattern", look)])
    assert torch.equal(seen[0], expected)


def test_generation_with_a_cache_is_the_same_generation(tokens):
    bridge = TransformerBridge(tiny("llama"))
    plain = bridge.generate(tokens, max_new_tokens=8, do_sample=False, return_type="tokens")
    made = bridge.generate(
        tokens, max_new_tokens=8, do_sample=False, return_type="tokens", return_cache=True
    )
    assert torch.equal(made[0], plain)
    assert made[1]["pattern", 0].shape[-2:] == (16, 16)
