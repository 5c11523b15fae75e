"""Decompositions that did not add up: norms after attention, projections with biases of their
own.
"""

import peft
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from bridge import TransformerBridge
from bridge.analysis.logit_lens import head_contributions
from tests.conftest import tiny


@pytest.mark.parametrize(
    ("cls", "config"), [(Gemma2ForCausalLM, Gemma2Config), (Gemma3ForCausalLM, Gemma3TextConfig)]
)
def test_heads_behind_a_norm_after_attention(cls, config):
    """Against the sum by hand: what attention writes, through the model's own norms, in float64."""
    torch.manual_seed(0)
    model = (
        cls(
            config(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=48,
                vocab_size=61,
            )
        )
        .eval()
        .double()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.5)
    bridge = TransformerBridge(model)
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    one, other = torch.tensor([5, 6]), torch.tensor([7, 8])
    direct = head_contributions(bridge, tokens, one, other)
    attended, last = {}, []
    for i, layer in enumerate(model.model.layers):
        layer.post_attention_layernorm.register_forward_hook(
            lambda m, a, o, i=i: attended.update({i: o[:, -1]})
        )
    model.model.norm.register_forward_pre_hook(lambda m, a: last.append(a[0][:, -1]))
    with torch.no_grad():
        model(tokens)
    scale = (last[0].pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    rows = model.get_output_embeddings().weight
    direction = (rows[one] - rows[other]) * (1 + model.model.norm.weight)
    for i in range(2):
        torch.testing.assert_close(direct[:, i].sum(-1), (attended[i] / scale * direction).sum(-1))


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
@pytest.mark.parametrize("more", [{}, {"lora_bias": True}, {"bias": "lora_only"}])
@pytest.mark.parametrize("targets", [["c_attn"], ["c_fc"], ["attn.c_proj"], ["mlp.c_proj"]])
def test_the_stream_adds_up_under_lora_with_a_bias(tokens, targets, more):
    config = peft.LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True, **more
    )
    model = peft.get_peft_model(tiny("gpt2"), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.3)
    bridge = TransformerBridge(model)
    _, cache = bridge.run_with_cache(tokens)
    terms = cache.get_full_resid_decomposition(layer=2, expand_neurons=True)
    torch.testing.assert_close(terms.sum(0), cache["resid_pre", 2], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
@pytest.mark.parametrize("adapter", ["none", "plain", "lora_only", "lora_bias", "ia3"])
def test_biases_are_those_that_the_model_adds(adapter):
    """Each bias is what its projection gives for zeros, whoever adds it; the model's own where
    nobody else does.
    """
    targets = ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]
    more = {"lora_only": {"bias": "lora_only"}, "lora_bias": {"lora_bias": True}}.get(adapter, {})
    model = tiny("gpt2")
    if adapter == "ia3":
        config = peft.IA3Config(
            target_modules=targets, feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True
        )
        model = peft.get_peft_model(model, config).eval()
    elif adapter != "none":
        config = peft.LoraConfig(
            r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True, **more
        )
        model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name or "ia3" in name:
                parameter.normal_(std=0.3)
    bridge = TransformerBridge(model)
    block = bridge.core.transformer.h[1]
    with torch.no_grad():
        fused = block.attn.c_attn(torch.zeros(32)).reshape(3, 4, 8)
        expected = {
            "attn.b_Q": fused[0],
            "attn.b_K": fused[1],
            "attn.b_V": fused[2],
            "attn.b_O": block.attn.c_proj(torch.zeros(32)),
            "mlp.b_in": block.mlp.c_fc(torch.zeros(32)),
            "mlp.b_out": block.mlp.c_proj(torch.zeros(128)),
        }
    stored = {p.untyped_storage().data_ptr() for p in bridge.core.parameters()}
    for name, value in expected.items():
        bias = bridge.weights[f"blocks.1.{name}"]
        torch.testing.assert_close(bias, value, msg=name)
        # IA3 scales the input of `mlp.c_proj`, and not its bias.
        own = adapter in ("none", "plain", "lora_only") or (
            adapter == "ia3" and name == "mlp.b_out"
        )
        assert (bias.untyped_storage().data_ptr() in stored) is own, name


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_a_stack_of_other_positions_is_refused(bridge, tokens, batch):
    """One row, or as many rows as positions, would be divided by scales of other positions without
    a word.
    """
    given = tokens[:1].repeat(batch, 1)
    _, cache = bridge.run_with_cache(given)
    stack, last = cache.decompose_resid(), cache.decompose_resid(pos_slice=-1)
    ids = torch.full((batch,), 5)
    for call in (
        lambda: cache.apply_ln_to_stack(stack, pos_slice=-1),
        lambda: cache.logit_attrs(stack, ids, pos_slice=-1),
        lambda: cache.logit_attrs(last, ids),
    ):
        with pytest.raises(ValueError, match=r"residual_stack has shape .* of the same positions"):
            call()
    everywhere = cache.logit_attrs(stack, ids)
    torch.testing.assert_close(cache.logit_attrs(last, ids, pos_slice=-1), everywhere[..., -1])


def test_a_stack_of_layers_and_heads(bridge, tokens):
    """What comes before the rows counts components, however many axes that takes (ARENA's heads by
    layer).
    """
    _, cache = bridge.run_with_cache(tokens)
    heads = torch.randn(3, 4, len(tokens), bridge.cfg.d_model)
    made = cache.apply_ln_to_stack(heads, pos_slice=-1)
    one_by_one = torch.stack([cache.apply_ln_to_stack(layer, pos_slice=-1) for layer in heads])
    assert torch.equal(made, one_by_one)
    with pytest.raises(ValueError, match="residual_stack has shape"):
        cache.apply_ln_to_stack(heads[:, :, :1], pos_slice=-1)
