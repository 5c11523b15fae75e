"""Quantised layers, whose weights and heads the bridge refuses to show: `verify` counts them as
refused, and not as failed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from adapters import verify
from adapters.linear import OpaqueLayerError
from bridge import TransformerBridge
from bridge.cli import model as named
from bridge.cli.main import main

TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


class WeightOnly(nn.Module):
    """A layer with a weight of four bits, and float inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        step = weight.abs().amax(1, keepdim=True) / 7
        self.step = nn.Buffer(step)
        self.rounded = nn.Buffer((weight / step).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.rounded * self.step)


class Rounding(WeightOnly):
    """The same, with its inputs rounded as they come."""

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / step).round() * step)


class Stopping(WeightOnly):
    """A layer without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def quantised(kind: type[WeightOnly]) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).eval()
    for block in model.model.layers:
        for inside, name in (
            (block.self_attn, "q_proj"),
            (block.self_attn, "o_proj"),
            (block.mlp, "down_proj"),
        ):
            setattr(inside, name, kind(getattr(inside, name)))
    return model


@pytest.mark.parametrize("kind", [WeightOnly, Rounding, Stopping])
def test_a_quantised_model_has_refused_weights_and_no_failures(kind: type[WeightOnly]) -> None:
    report = verify(TransformerBridge(quantised(kind)))
    assert report.passed and report and not report.failed, str(report)
    weights = {f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("attn.W_Q", "mlp.W_out")}
    assert weights <= report.refused.keys()
    assert "not a plain matrix" in report.refused["blocks.1.attn.W_O"]
    assert f"checks hold, {len(report.refused)} refused" in repr(report)
    assert "refused: blocks.0.attn.W_Q: layers.0.self_attn.q_proj is a" in str(report)


@pytest.mark.parametrize("kind", [WeightOnly, Rounding])
def test_heads_are_refused_where_they_do_not_add_up(kind: type[WeightOnly]) -> None:
    bridge = TransformerBridge(quantised(kind))
    name = "blocks.0.attn.hook_result"
    refused = name in verify(bridge).refused
    assert refused == (kind is Rounding)
    if refused:
        with pytest.raises(OpaqueLayerError, match="does not sum to its output"):
            bridge.run_with_cache(TOKENS, names_filter=name)


@pytest.mark.parametrize(("kind", "refused"), [(WeightOnly, False), (Rounding, True)])
def test_slopes_are_refused_where_a_layer_has_none(kind: type[WeightOnly], refused: bool) -> None:
    report = verify(TransformerBridge(quantised(kind)))
    assert ("model.layers.1.mlp.down_proj" in report.refused) == refused


def test_a_forward_that_a_library_puts_on_a_layer_counts_as_quantised() -> None:
    bridge = TransformerBridge(quantised(WeightOnly))
    layer = bridge.original_model.model.layers[1].mlp.up_proj
    layer.forward = Rounding(layer).forward
    report = verify(bridge)
    assert report.passed and "blocks.1.mlp.W_in" in report.refused, str(report)
    assert "model.layers.1.mlp.up_proj" in report.refused


def test_what_fails_beside_a_quantised_layer_still_fails() -> None:
    bridge = TransformerBridge(quantised(WeightOnly))
    bridge.cfg.eps *= 2
    report = verify(bridge)
    assert not report and report.failed and "the first: " in repr(report)
    assert "blocks.1.attn.W_Q" in report.refused


def test_a_model_without_quantised_layers_has_nothing_refused() -> None:
    report = verify(TransformerBridge.boot_embedded(), level="quick")
    assert report and not report.refused and "refused" not in str(report)


def test_the_command_line_counts_what_is_refused(capsys, monkeypatch) -> None:
    bridge = TransformerBridge(quantised(Rounding))
    monkeypatch.setattr(named, "named_model", lambda *args, **kwargs: bridge)
    assert main(["verify", "embedded", "--quick"]) == 0
    assert "LlamaForCausalLM: verified, " in capsys.readouterr().out.splitlines()[0]
