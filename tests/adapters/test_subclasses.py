"""A subclass from another package takes its parent's adapter where that holds of it; where not, it
is said.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from adapters import UnsupportedModelError, verify
from adapters.inputs import CannotBeMade
from bridge import TransformerBridge
from tests.tiny_models import add_noise, tiny_config

TOKENS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))


class _Parallel(nn.Module):
    """A block whose attention and MLP read the stream itself, both normed behind."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = block.self_attn, block.mlp
        width = block.input_layernorm.weight.shape[0]
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(width),
            LlamaRMSNorm(width),
        )

    def forward(self, hidden_states: Tensor, **more: object) -> Tensor:
        attended = self.self_attn(hidden_states=hidden_states, **more)[0]
        made = self.mlp(hidden_states)
        return hidden_states + self.input_layernorm(attended) + self.post_attention_layernorm(made)


class ParallelLlama(LlamaForCausalLM):
    """It has all the modules of its parent, by the same names, and computes something else."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(map(_Parallel, self.model.layers))


class SameLlama(LlamaForCausalLM):
    """It computes what its parent does."""


def made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = cls(tiny_config("llama")).eval()
    add_noise(model)
    return model


def test_another_computation_is_noticed_and_inferred(caplog: pytest.LogCaptureFixture) -> None:
    model = made(ParallelLlama)
    with caplog.at_level(logging.WARNING, "bridge"):
        bridge = TransformerBridge(model)
    said = caplog.records[0].getMessage()
    assert said.startswith(
        "ParallelLlama is a subclass of LlamaPreTrainedModel, whose adapter does not hold of it ("
    )
    assert bridge.offered().inferred and all(
        name.endswith(".mlp") for name in bridge.offered().not_offered
    )
    assert verify(bridge).passed and "blocks.0.hook_resid_mid" not in bridge.hook_dict
    seen: list[Tensor] = []
    handle = model.model.layers[1].input_layernorm.register_forward_hook(
        lambda *call: seen.append(call[-1])
    )
    _, cache = bridge.run_with_cache(TOKENS)
    handle.remove()
    assert torch.equal(cache["blocks.1.hook_attn_out"], seen[0])


def test_without_automatic_it_is_refused_with_the_claim() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"whose adapter does not hold of it \(.+: .+\)\. docs/adapters\.md",
    ):
        TransformerBridge(made(ParallelLlama), automatic=False)


def test_the_same_computation_keeps_its_parents_adapter(caplog: pytest.LogCaptureFixture) -> None:
    bridge = TransformerBridge(made(SameLlama))
    assert not bridge.offered().inferred and not caplog.records


def test_what_cannot_be_tried_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> str:
        raise CannotBeMade("it needs pixel_values")

    # A subclass that takes no tokens has another parent, or none that has an adapter.
    monkeypatch.setattr("adapters.proofs.proofs.some_tokens", fails)
    TransformerBridge(made(SameLlama))
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "SameLlama is a subclass of LlamaPreTrainedModel, whose adapter was not tried on it: it"
        " needs pixel_values"
    )


def test_of_transformers_own_classes_nothing_is_proved() -> None:
    """A wrap of a class that the registry knows costs no run."""
    ran: list[type] = []
    handle = register_module_forward_pre_hook(lambda module, args: ran.append(type(module)))
    try:
        TransformerBridge(made(LlamaForCausalLM))
        assert ran == []
        TransformerBridge(made(SameLlama))
        assert ran
    finally:
        handle.remove()
