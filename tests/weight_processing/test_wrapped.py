"""Layers that look plain and are not: their parameters are wrapped, computed or packed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from bridge import TransformerBridge
from tests.weight_processing.models import log_probs, tiny
from weight_processing.check import ProcessingError


class Packed(torch.Tensor):
    """A tensor that looks like a matrix of floats, as quantisation in place makes them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0])
        if func is torch.ops.aten.permute.default:
            return cls(torch.empty(args[0].shape[::-1], dtype=args[0].dtype))
        raise AssertionError(f"{func} of a packed tensor")


def test_tensors_that_are_not_plain() -> None:
    model = tiny("llama")
    layer = model.model.layers[1]
    layer.mlp.up_proj.weight = nn.Parameter(
        Packed(layer.mlp.up_proj.weight.detach()), requires_grad=False
    )
    bridge = TransformerBridge(model)
    with pytest.raises(
        ProcessingError, match=r"mlp\.up_proj is a Linear, whose weight \(Packed\) is not a plain"
    ):
        bridge.process_weights(fold_ln=True)
    layer.input_layernorm.weight = nn.Parameter(
        Packed(layer.input_layernorm.weight.detach()), requires_grad=False
    )
    layer.mlp.up_proj.weight = nn.Parameter(
        tiny("llama").model.layers[1].mlp.up_proj.weight.detach()
    )
    with pytest.raises(ProcessingError, match=r"blocks\.1\.ln1\.w is a Packed"):
        bridge.process_weights(fold_ln=True)


class LowRank(nn.Module):
    """A layer with a low-rank one beside it, as libraries that PEFT is not wrap it: all but its
    type looks the same.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape
        self.a, self.b = (
            nn.Parameter(torch.randn(2, columns)),
            nn.Parameter(torch.randn(rows, 2) * 0.1),
        )

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self.base, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = (self.b @ self.a)[x] if x.dtype == torch.long else x @ self.a.T @ self.b.T
        return self.base(x) + delta


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        ("q_proj", {"fold_ln"}),
        ("o_proj", {"fold_value_biases"}),
        ("v_proj", {"fold_ln", "fold_value_biases"}),
    ],
)
def test_wrapped_layers(layer: str, names: set[str]) -> None:
    model = tiny("qwen2")
    for block in model.model.layers:
        setattr(block.self_attn, layer, LowRank(getattr(block.self_attn, layer)))
    before, bridge = log_probs(model), TransformerBridge(model)
    bridge.process_weights(check=False)
    processed = bridge.cfg.processed
    assert {name for name, state in processed.items() if f"{layer} is a LowRank" in state} == names
    assert processed["center_unembed"] == "done"
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)


def test_a_wrapped_embedding() -> None:
    model = tiny("gpt2")
    model.transformer.wte = LowRank(model.transformer.wte)
    before, bridge = log_probs(model), TransformerBridge(model)
    bridge.process_weights(check=False)
    assert set(bridge.cfg.processed.values()) == {"done"}
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)


class KeptElsewhere(nn.Module):
    """A norm's copy that is trained beside the norm itself (PEFT's ``modules_to_save``)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.original, self.copy = norm, copy.deepcopy(norm)

    @property
    def weight(self) -> torch.Tensor:
        return self.copy.weight  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.copy(x)


def test_a_wrapped_norm() -> None:
    model = tiny("llama")
    model.model.norm = KeptElsewhere(model.model.norm)
    bridge = TransformerBridge(model)
    with pytest.raises(
        ProcessingError,
        match="ln_final is a KeptElsewhere whose weight is not a parameter of its own",
    ):
        bridge.process_weights(fold_ln=True)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("model.layers.0.self_attn.v_proj", {"fold_ln", "fold_value_biases"}),
        ("model.layers.1.self_attn.dense", {"center_writing_weights", "fold_value_biases"}),
        ("model.layers.0.mlp.fc1", {"fold_ln"}),
        ("lm_head", {"fold_ln", "center_unembed"}),
    ],
)
def test_biases_that_are_computed(path: str, names: set[str]) -> None:
    model = tiny("phi")
    prune.random_unstructured(model.get_submodule(path), "bias", 0.3)
    before, bridge = log_probs(model), TransformerBridge(model)
    bridge.process_weights(check=False)
    computed = {
        name
        for name, state in bridge.cfg.processed.items()
        if "computed from the model's parameters" in state
    }
    assert computed == names
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)
