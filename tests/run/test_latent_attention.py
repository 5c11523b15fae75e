"""Gradients at the norm before latent attention, and what a model that keeps no keys and values is asked for."""

import pytest
import torch

from bridge import TransformerBridge
from tests.tiny_models import tiny_model

LATENT = ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "glm4_moe_lite"]


@pytest.mark.parametrize("kind", LATENT)
def test_gradients_at_the_norm_before_latent_attention(kind):
    bridge = TransformerBridge(tiny_model(kind))
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    name = next(name for name in bridge.hook_dict if name.startswith("blocks.0.ln1") and name.endswith("hook_out"))
    module = bridge.original_model.get_submodule(bridge.hook_dict[name].point.site.path)
    out = []

    def keep(module, args, output):
        output.retain_grad()
        out.append(output)

    handle = module.register_forward_hook(keep)
    bridge(tokens, return_type="loss").backward()
    handle.remove()
    seen = []
    bridge.run_with_hooks(
        tokens, return_type="loss", bwd_hooks=[(name, lambda gradient, hook: seen.append(gradient))]
    ).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], out[0].grad)
    _, cache = bridge.run_with_cache(tokens, names_filter=name, return_type="loss", incl_bwd=True)
    torch.testing.assert_close(cache[name + "_grad"], out[0].grad)
    _, cache = bridge.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    assert "blocks.0.hook_resid_post_grad" in cache


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "recurrent_gemma"])
def test_a_cache_that_a_model_does_not_give_is_refused_before_it_runs(kind):
    bridge = TransformerBridge(tiny_model(kind))
    ran = []
    handle = bridge.original_model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match="returns no past_key_values"):
        bridge(torch.tensor([[3, 4, 5]]), return_type="logits_and_cache")
    handle.remove()
    assert not ran


def test_a_run_that_starts_at_a_layer_goes_on_from_a_past():
    bridge = TransformerBridge(tiny_model("whisper"))
    tokens = torch.randint(3, 61, (1, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, cache = bridge.run_with_cache(tokens, names_filter="blocks.1.hook_resid_pre")
        _, past = bridge(tokens[:, :5], return_type="logits_and_cache")
        later = bridge(cache["resid_pre", 1][:, 5:], start_at_layer=1, past_key_values=past)
    torch.testing.assert_close(later, whole[:, 5:], atol=1e-5, rtol=1e-4)
