"""A number that `z` is multiplied with is declared and proved; one that the run makes is none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from adapters import Attention, verify
from adapters.views import Affine
from bridge import TransformerBridge
from tests.adapters.mutations import declared_as
from tests.tiny_models import tiny_model


class Factor(nn.Module):
    """An output projection whose input is multiplied before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.factor: float | torch.Tensor = 0.7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.factor)


def scaled(*, of_the_run: bool = False) -> PreTrainedModel:
    """A Llama whose `z` is multiplied with 0.7, or with a number that is made of what attention is
    given.
    """
    model = tiny_model("llama")

    def make(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        module.get_submodule("o_proj").factor = kwargs["hidden_states"].abs().mean()

    for layer in model.model.layers:
        layer.self_attn.o_proj = Factor(layer.self_attn.o_proj)
        if of_the_run:
            layer.self_attn.register_forward_pre_hook(make, with_kwargs=True)
    return model


def test_a_constant_factor_is_found_and_proved() -> None:
    model = scaled()
    bridge = TransformerBridge(model, automatic="always")
    attn = bridge.architecture.stack.block.attn
    assert attn is not None and attn.z_transform == Affine(0.7)
    assert verify(bridge).passed, str(verify(bridge))
    steps = bridge.architecture.stack.block.steps
    wrong = replace(steps[0], part=replace(attn, z_transform=Affine(0.72)))
    stack = replace(
        bridge.architecture.stack,
        block=replace(bridge.architecture.stack.block, steps=(wrong, steps[1])),
    )
    with declared_as(replace(bridge.architecture, stacks=(stack,))):
        assert "pattern @ v = z" in {
            check.name for check in verify(TransformerBridge(model)).failed
        }


def test_a_factor_that_the_run_makes_is_left_out_by_name() -> None:
    bridge = TransformerBridge(scaled(of_the_run=True), automatic="always")
    assert (
        "something unknown stands between" in bridge.offered().not_offered["blocks.0.attn.hook_z"]
    )
    assert (
        "blocks.0.attn.hook_v" not in bridge.hook_dict
        and "blocks.0.attn.hook_q" in bridge.hook_dict
    )
    assert not any(isinstance(step.part, Attention) for step in bridge.architecture.steps())
