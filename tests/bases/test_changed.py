"""Bases that are trained or written to: what they encode afterwards, and what is made of features
that were cached before.
"""

import pytest
import torch
from torch import Tensor, nn

from bridge import TransformerBridge
from bridge.bases import Directions, Rotation
from bridge.features import feature_logit_attrs
from tests.bases.common import SAE
from tests.conftest import tiny

POINT = "blocks.1.hook_resid_post"


@pytest.fixture
def bridge() -> TransformerBridge:
    return TransformerBridge(tiny("llama"))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("n", [3, 8])
def test_a_rotation_stays_orthonormal_with_weight_decay(optimizer, n) -> None:
    rotation = Rotation(8, n, generator=torch.Generator().manual_seed(0))
    before = rotation.columns.detach().clone()
    steps = optimizer(rotation.parameters(), lr=0.01, weight_decay=0.1)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        steps.zero_grad()
        (rotation.encode(x) * torch.arange(n)).sum().backward()
        steps.step()
    columns = rotation.columns.detach()
    torch.testing.assert_close(columns.T @ columns, torch.eye(n))
    assert not torch.allclose(columns, before, atol=1e-3)


def test_directions_that_were_written_to_encode_by_the_new_ones() -> None:
    numbers = torch.Generator().manual_seed(0)
    first, second = (torch.randn(8, 3, generator=numbers) for _ in range(2))
    basis, x = Directions(first), torch.randn(5, 8, generator=numbers)
    basis.columns.data.copy_(second)
    torch.testing.assert_close(basis.encode(x), x @ torch.linalg.pinv(second).T)
    torch.testing.assert_close(
        basis.decode(basis.encode(basis.decode(x[:, :3]))), x[:, :3] @ second.T
    )


def test_what_a_changed_basis_made_of_features_is_refused(bridge, tokens) -> None:
    basis = SAE(32, 40)
    point = bridge.add_basis(POINT, "sae", basis)
    names = [POINT, point.name, "ln_final.hook_scale"]
    _, cache = bridge.run_with_cache(tokens, names_filter=names)
    expected = cache[POINT] - basis.decode(cache[point.name])
    torch.testing.assert_close(bridge.basis_error(cache, point), expected)
    basis.W_dec.data *= 2
    with pytest.raises(ValueError, match="was changed since the run"):
        bridge.basis_error(cache, point)
    with pytest.raises(ValueError, match="was changed since the run"):
        feature_logit_attrs(cache, point.name, 5)
    bridge.remove_basis(point)
    bridge.add_basis(POINT, "sae", SAE(32, 40))
    with pytest.raises(ValueError, match="was changed since the run"):
        bridge.basis_error(cache, POINT + ".sae")


class Remembers(nn.Module):
    """A basis whose `decode` undoes what the last `encode` divided by."""

    class cfg:
        normalize_activations = "layer_norm"

    def encode(self, x: Tensor) -> Tensor:
        self.scale = x.std(-1, keepdim=True)
        return x / self.scale

    def decode(self, features: Tensor) -> Tensor:
        return features * self.scale


def test_a_basis_that_remembers_its_input_is_asked_anew(bridge, tokens) -> None:
    point = bridge.add_basis(POINT, "normed", Remembers())
    _, cache = bridge.run_with_cache(tokens, names_filter=[POINT, point.name])
    bridge.run_with_cache(tokens.flip(1), names_filter=point)
    assert bridge.basis_error(cache, point).abs().max() < 1e-5


def test_a_hook_that_runs_a_basis_that_remembers(bridge, tokens) -> None:
    point = bridge.add_basis(POINT, "normed", Remembers(), error="drop")
    inside = []

    def runs(features, hook):
        if not inside:
            inside.append(True)
            bridge(tokens.flip(1))

    with torch.no_grad():
        expected = bridge(tokens)
        torch.testing.assert_close(
            bridge.run_with_hooks(tokens, fwd_hooks=[(point, runs)]), expected
        )
