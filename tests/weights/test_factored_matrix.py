"""`FactoredMatrix` and composition scores against the products themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge import FactoredMatrix
from bridge.analysis.svd import composition_scores
from tests.analysis.models import bridge_of

SIZES = st.integers(1, 6)
LEADING = st.sampled_from([(), (3,), (2, 3)])


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, atol=1e-9, rtol=1e-9)


@st.composite
def matrices(draw: st.DrawFn) -> FactoredMatrix:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    left, middle, right = (draw(SIZES) for _ in range(3))
    leading = draw(LEADING)
    broadcast = leading if draw(st.booleans()) else (1,) * len(leading)
    return FactoredMatrix(
        torch.randn(*leading, left, middle, generator=generator, dtype=torch.float64),
        torch.randn(*broadcast, middle, right, generator=generator, dtype=torch.float64),
    )


@given(matrices())
@settings(deadline=None)
def test_what_it_is(m: FactoredMatrix) -> None:
    product = m.A @ m.B
    close(m.AB, product)
    assert (m.shape, m.ndim) == (product.shape, product.ndim)
    assert m.pair == (m.A, m.B)
    assert m.has_leading_dims == (m.ndim > 2)
    close(m.T.AB, product.mT)
    U, S, Vh = m.svd()
    close(U @ torch.diag_embed(S) @ Vh.mT, product)
    k = S.shape[-1]
    assert k == min(m.ldim, m.mdim, m.rdim)
    for basis in (U, Vh):
        close(basis.mT @ basis, torch.eye(k, dtype=torch.float64).expand(*m.shape[:-2], k, k))
    close(S, torch.linalg.svdvals(product)[..., :k])
    assert all(ours is whole for ours, whole in zip((m.U, m.S, m.Vh), m.svd(), strict=True))
    close(m.norm(), product.flatten(-2).norm(dim=-1))
    close(m.make_even().AB, product)
    close(m.U @ m.collapse_l(), product)
    close(m.collapse_r() @ m.Vh.mT, product)
    close(m.get_corner(2), product[(slice(2),) * product.ndim])
    close((m * 3).AB, 3 * product)
    close((torch.tensor([2.0], dtype=torch.float64) * m).AB, 2 * product)


@given(matrices(), st.integers(1, 5))
@settings(deadline=None)
def test_products(m: FactoredMatrix, n: int) -> None:
    product = m.AB
    right, left = (
        torch.randn(m.rdim, n, dtype=torch.float64),
        torch.randn(n, m.ldim, dtype=torch.float64),
    )
    for ours, expected in (
        (m @ right, product @ right),
        (left @ m, left @ product),
        (m @ FactoredMatrix(right, right.T), product @ right @ right.T),
        (FactoredMatrix(left.T, left) @ m, left.T @ left @ product),
    ):
        assert isinstance(ours, FactoredMatrix)
        assert ours.mdim <= max(m.mdim, min(m.rdim, m.ldim), n)
        close(ours.AB, expected)
    close(m @ right[:, 0], product @ right[:, 0])
    close(left[0] @ m, left[0] @ product)


@given(matrices().filter(lambda m: m.ldim == m.rdim))
@settings(deadline=None)
def test_square_ones(m: FactoredMatrix) -> None:
    close(m.BA, m.B @ m.A)
    ours, right = m.eigenvalues, torch.linalg.eigvals(m.AB)
    k = min(m.mdim, m.ldim)
    # The same but for zeros: compare power sums, which need no order.
    for power in (1, 2, 3):
        torch.testing.assert_close(
            (ours**power).sum(-1), (right**power).sum(-1), atol=1e-6, rtol=1e-6
        )
    assert ours.shape == (*m.shape[:-2], m.mdim)
    assert k <= m.mdim


def test_indices() -> None:
    m = FactoredMatrix(torch.randn(3, 4, 5, 2), torch.randn(4, 2, 6))
    for index in (
        0,
        -1,
        slice(1, 3),
        (0, 2),
        (slice(None), 1),
        (None, 1),
        (..., 2),
        (torch.tensor([0, 2]),),
        ([0, 2], 1),
        (1, slice(None), slice(1, 3)),
        (slice(None), 0, slice(None), slice(2, 5)),
        (Ellipsis, slice(1, 3), slice(2)),
    ):
        index = index if isinstance(index, tuple) else (index,)
        expected = m.AB[index]
        ours = m[index].AB
        if index == (..., 2):
            expected = expected[..., None]
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(m[0, 1, 2].AB, m.AB[0, 1, 2][None])
    torch.testing.assert_close(m[0, 1, -1, -1].AB, m.AB[0, 1, -1, -1][None, None])
    assert m.unsqueeze(1).shape == (3, 1, 4, 5, 6)
    with pytest.raises(IndexError, match="5 indices"):
        m[0, 0, 0, 0, 0]


def test_what_does_not_fit() -> None:
    m = FactoredMatrix(torch.ones(4, 2), torch.ones(2, 5))
    assert repr(m) == "FactoredMatrix(shape=[4, 5], mdim=2)"
    with pytest.raises(ValueError, match=r"they are \[4, 2\] and \[3, 5\]"):
        FactoredMatrix(torch.ones(4, 2), torch.ones(3, 5))
    with pytest.raises(ValueError, match="needs a square matrix"):
        m.BA  # noqa: B018
    with pytest.raises(ValueError, match=r"cannot multiply \[4, 5\] with \[4, 5\]"):
        m @ m
    with pytest.raises(ValueError, match=r"cannot multiply \[3\] with"):
        torch.ones(3) @ m
    with pytest.raises(ValueError, match="matrices multiply with @"):
        m * torch.ones(2)
    for wrong in (
        lambda: m.BA,
        lambda: m @ m,
        lambda: m * torch.ones(2),
        lambda: torch.ones(2) * m,
    ):
        with pytest.raises(AssertionError):  # HookedTransformer's are assertions
            wrong()
    with pytest.raises(TypeError):
        m @ "text"  # type: ignore[operator]


def test_a_new_axis_stands_before_the_rows() -> None:
    for m in (
        FactoredMatrix(torch.randn(5, 2), torch.randn(2, 7)),
        FactoredMatrix(torch.randn(3, 5, 2), torch.ones(2, 7)),
    ):
        torch.testing.assert_close(m[None].AB, m.AB[None])
        torch.testing.assert_close(m[None, ..., 1:4, :].AB, m.AB[None, ..., 1:4, :])
    with pytest.raises(IndexError, match="a new axis must come before rows"):
        m[0, :, None]
    assert m.V is m.Vh


def test_half_precision() -> None:
    m = FactoredMatrix(
        torch.randn(4, 2, dtype=torch.bfloat16), torch.randn(2, 4, dtype=torch.bfloat16)
    )
    assert m.S.dtype == m.norm().dtype == torch.float32
    assert m.eigenvalues.dtype == torch.complex64


def test_composition_by_hand() -> None:
    left, right = (
        FactoredMatrix(torch.randn(2, 3, 6, 2).double(), torch.randn(2, 3, 2, 6).double())
        for _ in range(2)
    )
    scores = composition_scores(left, right)
    assert scores.shape == (2, 3, 2, 3)
    for i, j, k, n in itertools.product(range(2), range(3), range(2), range(3)):
        one, other = left.AB[i, j], right.AB[k, n]
        close(scores[i, j, k, n], (one @ other).norm() / one.norm() / other.norm())
    paired = composition_scores(left, right[0], broadcast_dims=False)
    close(paired[1, 2], scores[1, 2, 0, 2])
    single = composition_scores(left[0, 0], right)
    close(single, scores[0, 0])
    with pytest.raises(ValueError, match=r"left.rdim must be right.ldim"):
        composition_scores(left[..., :3], right)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gptj", "bert"])
def test_heads_of_a_model_by_hand(case: str) -> None:
    bridge = bridge_of(case)
    n = bridge.cfg.n_layers
    W_Q, W_K, W_V, W_O = (getattr(bridge, f"W_{x}").detach().double() for x in "QKVO")
    OV, QK = W_V @ W_O, W_Q @ W_K.mT
    for mode, reads in (("Q", QK), ("K", QK.mT), ("V", OV)):
        scores = bridge.all_composition_scores(mode)
        for i, j in itertools.product(range(n), range(n)):
            right = (OV[i, 1] @ reads[j, 2]).norm() / OV[i, 1].norm() / reads[j, 2].norm()
            expected = right.float() if i < j else torch.tensor(0.0)
            torch.testing.assert_close(scores[i, 1, j, 2].detach(), expected, atol=1e-5, rtol=1e-5)
    assert bridge.attn_head_labels == bridge.all_head_labels == bridge.all_head_labels()
    assert len(bridge.all_head_labels) == n * bridge.cfg.n_heads
    assert bridge.get_neuron_labels(1)[-1] == f"L0N{bridge.cfg.d_mlp - 1}"


def test_a_mode_that_is_none() -> None:
    from bridge.analysis.svd import all_scores

    with pytest.raises(ValueError, match="mode is 'O'; it must be 'Q', 'K' or 'V'"):
        all_scores(bridge_of("gpt2").OV, bridge_of("gpt2").QK, "O")


@pytest.mark.parametrize(
    "kind", [lambda mask: mask, lambda mask: mask.numpy(), lambda mask: mask.tolist()]
)
@pytest.mark.parametrize(
    "mask", [torch.tensor([[True, False, True], [False, True, False]]), torch.tensor([True, False])]
)
def test_a_mask_stands_for_as_many_axes_as_it_has(kind, mask):
    matrix = FactoredMatrix(torch.randn(2, 3, 5, 2), torch.randn(2, 3, 2, 7))
    dense = matrix.AB[mask]
    index, rest = kind(mask), (slice(None),) * (2 - mask.ndim)
    torch.testing.assert_close(matrix[index, ...].AB, dense)
    torch.testing.assert_close(matrix[index, ..., 1].AB, dense[..., 1:2])
    torch.testing.assert_close(matrix[index, ..., 1, :].AB, dense[..., 1:2, :])
    torch.testing.assert_close(matrix[(index, *rest, 1)].AB, dense[..., 1:2, :])
    torch.testing.assert_close(matrix[None, index, ..., 1].AB, dense[None, ..., 1:2])


def test_numbers_of_any_kind_keep_rows_and_columns():
    matrix = FactoredMatrix(torch.randn(3, 5, 2), torch.randn(3, 2, 7))
    for number in (np.int64(1), torch.tensor(1)):
        torch.testing.assert_close(matrix[number, number, number].AB, matrix.AB[1, 1:2, 1:2])
    torch.testing.assert_close(
        matrix[np.array([2, 0]), ..., np.int64(-1)].AB, matrix.AB[[2, 0], :, -1:]
    )
    for wrong in (
        (..., ...),
        (0, 0, 0, 0),
        (None, 0, 0, 0, 0),
        (torch.ones(3, 5, dtype=torch.bool), 0),
    ):
        with pytest.raises(IndexError):
            matrix[wrong]
