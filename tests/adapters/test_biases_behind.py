"""What a block adds behind a part, constants and parameters: heads and biases sum to what enters
the stream.
"""

from __future__ import annotations

from typing import Any, cast

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from adapters import Step, verify
from bridge import TransformerBridge
from tests.tiny_models import add_noise, tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(7))


class Shifted(nn.Module):
    """A layer of Llama's that adds ``2 * attention + a`` and ``0.5 * mlp + b``."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.a, self.b = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x = hidden_states + (
            2 * self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
            + self.a
        )
        return x + (0.5 * self.mlp(self.post_attention_layernorm(x)) + self.b)


def shifted_llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config)
    model.model.layers = nn.ModuleList(map(Shifted, model.model.layers))
    add_noise(model)
    return model.eval()


MODELS = {
    "gpt_neox_japanese": lambda: TransformerBridge(tiny_model("gpt_neox_japanese")),
    "shifted": lambda: TransformerBridge(shifted_llama(), automatic="always"),
}


@pytest.fixture(params=MODELS)
def bridge(request: pytest.FixtureRequest) -> TransformerBridge:
    """In float64."""
    made = MODELS[request.param]()
    assert verify(made).passed and not made.offered().not_offered
    made.original_model.double()
    return made


def test_heads_and_bias_sum_to_what_is_added(bridge: TransformerBridge) -> None:
    """`hook_result` over all heads, and ``b_O``, is the difference of two streams of the model's
    own.
    """
    bridge.set_use_attn_result(True)
    _, cache = bridge.run_with_cache(TOKENS)
    for layer in range(2):
        at = f"blocks.{layer}"
        added = cache[f"{at}.hook_resid_mid"] - cache[f"{at}.hook_resid_pre"]
        heads = cache[f"{at}.attn.hook_result"].sum(-2)
        torch.testing.assert_close(
            heads + bridge.weights[f"{at}.attn.b_O"], added, rtol=1e-10, atol=1e-10
        )
        neurons = cache[f"{at}.mlp.hook_post"] @ bridge.weights[f"{at}.mlp.W_out"]
        added = cache[f"{at}.hook_resid_post"] - cache[f"{at}.hook_resid_mid"]
        torch.testing.assert_close(
            neurons + bridge.weights[f"{at}.mlp.b_out"], added, rtol=1e-10, atol=1e-10
        )


def test_the_stream_is_the_sum_of_heads_neurons_and_biases(bridge: TransformerBridge) -> None:
    _, cache = bridge.run_with_cache(TOKENS)
    parts = cache.get_full_resid_decomposition()
    torch.testing.assert_close(
        parts.sum(0), cache["blocks.1.hook_resid_post"], rtol=1e-10, atol=1e-10
    )
    assert (
        parts.shape[0] == 2 * (4 + cast(int, bridge.cfg.d_mlp)) + 2
    )  # and the embedding, and the biases


@torch.no_grad()
def test_an_edit_of_what_is_added(bridge: TransformerBridge) -> None:
    """Half of it, bias included, by plain torch hooks: the layer's input of the MLP's norm would be
    the stream.
    """
    name = "blocks.1.hook_attn_out"
    layer: Any = bridge.core.base_model.layers[1]
    attn = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
    _, cache = bridge.run_with_cache(TOKENS, names_filter=name)
    factor = 2.0 if isinstance(layer, Shifted) else 1.0

    def less(module: nn.Module, args: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return output[0] - cache[name] / (2 * factor), *output[1:]

    handle = attn.register_forward_hook(less)
    expected = bridge.original_model(TOKENS).logits
    handle.remove()
    found = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x / 2)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found, bridge(TOKENS))


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
def test_a_bias_of_loras_own_counts_beside_it() -> None:
    model = shifted_llama()
    config = peft.LoraConfig(target_modules=["o_proj"], lora_bias=True, init_lora_weights=False)
    bridge = TransformerBridge(
        peft.get_peft_model(model, config).eval().double(), automatic="always"
    )
    _, cache = bridge.run_with_cache(TOKENS)
    parts = cache.get_full_resid_decomposition(expand_neurons=False)
    torch.testing.assert_close(
        parts.sum(0), cache["blocks.1.hook_resid_post"], rtol=1e-10, atol=1e-10
    )


def test_a_wrong_result_of_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads without the constant that the block multiplies them with."""
    # The library itself is made wrong: a declaration cannot say it.
    monkeypatch.setattr(Step, "last_factor", 1.0)
    bridge = TransformerBridge(shifted_llama(), automatic="always")
    assert (
        "not proved: z through W_O gives attn_out"
        in bridge.offered().not_offered["blocks.0.attn.hook_result"]
    )
    assert "blocks.0.attn.hook_result" not in bridge.hook_dict and verify(bridge).passed
