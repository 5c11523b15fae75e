"""Gradients at the norm before latent attention, and what a model that keeps no keys and values is
asked for.
"""

import copy

import pytest
import torch
from transformers import LlamaConfig

from adapters.inputs import gives_cache, past_of, with_past_named
from bridge import NativeConfig, TransformerBridge
from tests.tiny_models import tiny_model

LATENT = ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "glm4_moe_lite"]


@pytest.mark.parametrize("kind", LATENT)
def test_gradients_at_the_norm_before_latent_attention(kind):
    bridge = TransformerBridge(tiny_model(kind))
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    name = next(
        name
        for name in bridge.hook_dict
        if name.startswith("blocks.0.ln1") and name.endswith("hook_out")
    )
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


def test_a_configuration_that_counts_its_layers_by_another_name():
    class Few(LlamaConfig):
        model_type = "few"

        def __getattribute__(self, name):
            if name == "num_hidden_layers":
                raise AttributeError(name)
            return super().__getattribute__(name)

    model = tiny_model("llama")
    assert gives_cache(model)
    named = copy.copy(model)
    named.config = copy.copy(model.config)
    named.config.__class__ = Few
    assert gives_cache(named)


def test_two_names_of_the_keys_and_values_are_not_mixed():
    past = object()
    known = {"past_key_values", "use_cache"}
    assert with_past_named({"cache": past, "past_key_values": None}, known) == {
        "past_key_values": past
    }
    assert with_past_named({"cache": past}, {"input_ids"}) == {"cache": past}
    both = {"cache": past, "past_key_values": object()}
    assert with_past_named(both, known) == both  # the model refuses it
    assert past_of({"past_key_values": None, "cache": past}) is past
    bridge = TransformerBridge.boot_native(
        NativeConfig(n_layers=1, d_model=8, n_ctx=9, d_head=4, d_vocab=10, act_fn="relu")
    )
    _, cache = bridge(torch.tensor([[1, 2]]), return_type="logits_and_cache")
    with pytest.raises(ValueError, match="two names of one argument"):
        bridge(torch.tensor([[3]]), past_key_values=cache, cache=copy.copy(cache))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"])
@pytest.mark.parametrize("norm", ["q_a_layernorm", "kv_a_layernorm"])
def test_norms_of_latents_are_shown_and_edited(family: str, norm: str) -> None:
    model = tiny_model(family).eval()
    bridge, tokens = TransformerBridge(model), torch.tensor([[5, 9, 2, 7], [1, 3, 8, 4]])
    module = next(m for name, m in model.named_modules() if name.endswith(f"0.self_attn.{norm}"))
    entered: list[torch.Tensor] = []
    with torch.no_grad():
        handle = module.register_forward_hook(lambda _, given, made: entered.append(given[0]))
        plain, cache = bridge.run_with_cache(tokens)
        handle.remove()
        x = entered[0].double()
        scale = (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()  # type: ignore[operator]
        start = f"blocks.0.attn.{norm}"
        torch.testing.assert_close(
            cache[f"{start}.hook_scale"].double(), scale, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            cache[f"{start}.hook_normalized"].double(), x / scale, rtol=1e-5, atol=1e-6
        )
        for point in ("hook_scale", "hook_normalized"):
            factor = 2.0 if point == "hook_scale" else 0.5
            edited = bridge.run_with_hooks(
                tokens, fwd_hooks=[(f"{start}.{point}", lambda act, hook, f=factor: act * f)]
            )
            handle = module.register_forward_hook(lambda _, given, made: made / 2)
            expected = model(tokens).logits
            handle.remove()
            torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(edited, plain, atol=1e-3)


@pytest.mark.parametrize("norm", ["b_layernorm", "c_layernorm", "dt_layernorm"])
def test_norms_inside_of_a_mixer_are_shown_and_edited(norm: str) -> None:
    model = tiny_model("jamba").eval()
    bridge, tokens = TransformerBridge(model), torch.tensor([[5, 9, 2, 7], [1, 3, 8, 4]])
    module = next(m for name, m in model.named_modules() if name.endswith(f"0.mamba.{norm}"))
    entered: list[torch.Tensor] = []
    with torch.no_grad():
        with module.register_forward_hook(lambda _, given, made: entered.append(given[0])):
            _, cache = bridge.run_with_cache(tokens)
        scale = (entered[0].pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()  # type: ignore[operator]
        start = f"blocks.0.mixer.{norm}"
        torch.testing.assert_close(cache[f"{start}.hook_scale"], scale, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            cache[f"{start}.hook_normalized"], entered[0] / scale, rtol=1e-5, atol=1e-6
        )
        assert torch.equal(cache[f"{start}.hook_out"], cache[f"blocks.0.mixer.hook_{norm}"])
        edited = bridge.run_with_hooks(
            tokens, fwd_hooks=[(f"{start}.hook_scale", lambda act, hook: act * 2)]
        )
        with module.register_forward_hook(lambda _, given, made: made / 2):
            torch.testing.assert_close(edited, model(tokens).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(edited, model(tokens).logits, atol=1e-4)
