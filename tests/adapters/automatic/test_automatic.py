"""`TransformerBridge` on a model whose class has no adapter: inferred, proved, said once; or
refused.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from adapters import UnsupportedModelError, verify
from adapters.automatic.automatic import infer
from adapters.observe.observe import mark
from bridge import TransformerBridge
from tests.conftest import torch_hooks
from tests.tiny_models import Task, tiny_model

TOKENS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))


def test_it_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bridge"):
        bridge = TransformerBridge(tiny_model("diffllama"))
        bridge(TOKENS)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "bridge"]
    assert said == bridge.offered().summary
    assert said.startswith(
        "DiffLlamaForCausalLM has no adapter. One was inferred from a run and proved on it"
    )


@pytest.mark.parametrize("model_type", ["ctrl", "cpmant", "diffllama"])
def test_what_is_offered_is_proved(model_type: str) -> None:
    """Not all of the second can be proved: that is said, and not offered."""
    bridge = TransformerBridge(tiny_model(model_type))
    report = verify(bridge)
    assert report.passed, str(report)
    assert ("not proved" in bridge.offered().summary) == (model_type == "cpmant")
    assert bridge.offered().inferred and len(bridge.offered().summary.splitlines()) == 1


def test_what_is_not_offered_is_listed_with_the_reason() -> None:
    offered = TransformerBridge(tiny_model("diffllama")).offered()
    missing = {f"blocks.{layer}.attn.hook_{letter}" for layer in (0, 1) for letter in "vz"}
    assert offered.inferred and set(offered.not_offered) == missing
    assert (
        "not offered: blocks.0.attn.hook_v: v: no projection has columns of its own for each head"
        in str(offered)
    )
    assert {"blocks.0.hook_attn_out", "blocks.0.attn.hook_q"} <= set(offered.names)
    assert "blocks.0.attn.hook_z" not in offered.names


def test_a_mixer_is_offered_with_its_modules() -> None:
    offered = TransformerBridge(tiny_model("mamba")).offered()
    assert {"blocks.0.hook_mixer_out", "blocks.0.mixer.hook_in_proj"} <= set(offered.names)


def test_a_model_without_attention_has_no_heads() -> None:
    cfg = TransformerBridge(tiny_model("mamba")).cfg
    assert (cfg.n_heads, cfg.d_head, cfg.n_key_value_heads) == (0, 0, None)


def test_a_gate_by_relu_is_told_from_what_it_multiplies() -> None:
    """A ReLU's derivative is zero or one, as that of no function at all."""
    model = tiny_model("llama", hidden_act="relu")
    mlp = infer(model).architecture.stack.block_at(0).mlp
    assert mlp is not None and mlp.gate is not None
    assert (mlp.gate.path, mlp.up.path) == ("gate_proj", "up_proj")


def test_numbers_of_a_tensor_without_axes() -> None:
    assert mark(torch.tensor(2.0)) == mark(torch.tensor(2.0)) != mark(torch.tensor(3.0))


def test_a_declared_model_offers_what_is_declared(embedded: TransformerBridge) -> None:
    offered = embedded.offered()
    assert (
        not offered.inferred
        and not offered.not_offered
        and offered.names == tuple(embedded.hook_dict)
    )


def test_without_automatic_it_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no adapter for DiffLlamaForCausalLM"):
        TransformerBridge(tiny_model("diffllama"), automatic=False)


def test_an_option_that_a_declaration_is_not_for_is_inferred() -> None:
    """OLMo with `clip_qkv` writes over its queries: its adapter says nothing of that."""
    model = tiny_model("olmo", clip_qkv=0.1)
    offered = TransformerBridge(model).offered()
    assert (
        offered.inferred
        and "OlmoForCausalLM has an adapter for other options than these." in offered.summary
    )
    with pytest.raises(UnsupportedModelError, match=r"is for clip_qkv=None, and this one has 0\.1"):
        TransformerBridge(model, automatic=False)
    assert not TransformerBridge(tiny_model("olmo"), automatic=False).offered().inferred


@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    [("diffusion_gemma", "image_text", r"it has 2 lists of blocks")],
)
def test_where_nothing_can_be_inferred_the_reason_is_said(
    model_type: str, task: Task, reason: str
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"^[^:]*{reason}.*: so what plays which part in "
    ):
        TransformerBridge(tiny_model(model_type, task))


def test_a_model_without_weights_is_refused() -> None:
    model = tiny_model("diffllama").to("meta")
    with pytest.raises(UnsupportedModelError, match="it has no weights"):
        TransformerBridge(model)


def test_the_model_is_as_it_was() -> None:
    model = tiny_model("granite").train()
    before, state = torch_hooks(model), {name: x.clone() for name, x in model.state_dict().items()}
    TransformerBridge(model, automatic="always")
    assert model.training and torch_hooks(model) == before
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_a_frozen_model_is_inferred_as_any_other() -> None:
    model = tiny_model("olmo2")
    found = infer(model).architecture
    assert infer(model.requires_grad_(False)).architecture == found


def test_a_copy_offers_the_same() -> None:
    bridge = TransformerBridge(tiny_model("stablelm"), automatic="always")
    assert list(copy.deepcopy(bridge).hook_dict) == list(bridge.hook_dict)


def test_factors_are_found() -> None:
    """Granite multiplies the embedding, and what each part adds."""
    model = tiny_model("granite")
    bridge = TransformerBridge(model, automatic="always")
    assert (
        {step.last_factor for step in bridge.architecture.steps()}
        == {model.config.residual_multiplier}
        == {0.3}
    )
    assert bridge.architecture.embedding.factor == model.config.embedding_multiplier == 3.0
    with torch.no_grad():
        own = model(TOKENS, output_hidden_states=True).hidden_states
        _, cache = bridge.run_with_cache(TOKENS)
    torch.testing.assert_close(cache["hook_embed"], own[0])
    torch.testing.assert_close(cache["resid_pre", 1], own[1])


def test_what_the_model_writes_over_is_in_a_cache_of_everything() -> None:
    """Falcon adds what attention wrote to what the MLP returned, in place."""
    model, name, seen = tiny_model("falcon", num_hidden_layers=1), "blocks.0.hook_mlp_out", []
    _, cache = TransformerBridge(model).run_with_cache(TOKENS)
    model.transformer.h[0].mlp.register_forward_hook(
        lambda module, args, output: seen.append(output.clone())
    )
    model(TOKENS)
    assert torch.equal(cache[name], seen[0])


def test_a_part_of_which_no_gradient_can_be_taken_is_tried_with_another_input() -> None:
    """RWKV writes over what a gradient would be taken from: its attention is no MLP, and what it
    calls one is none.
    """
    offered = TransformerBridge(tiny_model("rwkv")).offered()
    assert not any("mlp" in name or "attn" in name for name in offered.names)
    assert {"blocks.1.hook_mixer_out", "blocks.1.hook_mixer_2_out", "blocks.0.ln0.hook_out"} <= set(
        offered.names
    )


def test_a_wrong_norm_is_no_norm() -> None:
    """A norm that computes something else than any known one is left out by name."""

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (1 + x.abs().mean(-1, keepdim=True))

    model = tiny_model("olmo")
    model.model.layers[1].input_layernorm = Odd()
    bridge = TransformerBridge(model, automatic="always")
    assert "Odd, which is no norm that is known" in bridge.offered().not_offered["blocks.1.ln1"]
    assert (
        "blocks.1.ln1.hook_scale" not in bridge.hook_dict
        and "blocks.0.ln1.hook_scale" in bridge.hook_dict
    )


@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v3", "roberta"])
def test_inferred_adapters_verify(model_type: str) -> None:
    report = verify(TransformerBridge(tiny_model(model_type), automatic="always"))
    assert report.passed, str(report)
