"""Norms are recognised by what they compute: kind, offset and epsilon, at their initial values and
elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from adapters.observe.recognised import recognise_module, recognise_norm

NORMS = {
    "layer": (lambda: nn.LayerNorm(32, eps=1e-5), True, 0.0, 1e-5),
    "layer without bias": (lambda: nn.LayerNorm(32, eps=1e-3, bias=False), True, 0.0, 1e-3),
    "layer without weight": (
        lambda: nn.LayerNorm(32, eps=1e-5, elementwise_affine=False),
        True,
        0.0,
        1e-5,
    ),
    "layer with no epsilon to speak of": (lambda: nn.LayerNorm(32, eps=1e-20), True, 0.0, 0.0),
    "root mean square": (lambda: nn.RMSNorm(32, eps=1e-6), False, 0.0, 1e-6),
    "one plus weight": (lambda: GemmaRMSNorm(32, eps=1e-6), False, 1.0, 1e-6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("name", NORMS)
def test_recognised(name: str, noise: float, dtype: torch.dtype) -> None:
    make, centered, offset, eps = NORMS[name]
    module = make()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    module = module.to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    found = recognise_module(module, 32, torch.zeros(1, dtype=dtype), tolerance=tolerance)
    assert found is not None
    assert (found.centered, found.offset) == (centered, offset)
    assert found.eps == (
        eps if not eps else pytest.approx(eps, rel=1e-5 if dtype == torch.float32 else 1e-2)
    )


@pytest.mark.parametrize(
    "module", [nn.Identity(), nn.Linear(32, 32), nn.Tanh(), nn.GroupNorm(4, 32)]
)
def test_what_is_no_norm_is_not_recognised(module: nn.Module) -> None:
    torch.manual_seed(0)
    assert recognise_module(module, 32, torch.zeros(1)) is None


def test_a_weight_that_is_not_declared_is_noticed() -> None:
    norm = nn.LayerNorm(32)
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 32)
    assert recognise_norm(x, norm(x), norm) is not None
    without = nn.LayerNorm(32, bias=False)
    assert recognise_norm(x, norm(x), without) is None
