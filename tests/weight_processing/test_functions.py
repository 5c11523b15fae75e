"""The identity of each transform, by hand in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from weight_processing import (
    center_unembed,
    center_writing_weights,
    fold_layer_norm,
    fold_value_biases,
    refactor_query_key,
    refactor_value_output,
)

D = 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_fold_layer_norm(heads: list[int], out: int, seed: int) -> None:
    W, w, b, x = (
        random(*heads, D, out, seed=seed),
        random(D, seed=seed),
        random(D, seed=seed + 1),
        random(4, D, seed=seed),
    )
    new, bias = fold_layer_norm(W, w, b)
    assert bias is not None
    close(F.layer_norm(x, (D,)) @ new + bias.unsqueeze(-2), F.layer_norm(x, (D,), w, b) @ W)
    close(new.sum(-2), torch.zeros_like(new.sum(-2)))


def test_fold_rms_norm_without_centring() -> None:
    W, w, x = random(D, 3), random(D), random(4, D)
    new, bias = fold_layer_norm(W, w, center=False)
    assert bias is None
    close(F.rms_norm(x, (D,)) @ new, F.rms_norm(x, (D,), w) @ W)


def test_a_norm_without_weight_only_centres() -> None:
    W, x = random(D, 3), random(4, D)
    new, _ = fold_layer_norm(W, None)
    close(F.layer_norm(x, (D,)) @ new, F.layer_norm(x, (D,)) @ W)
    assert not torch.equal(new, W)


def test_center_writing_weights() -> None:
    W, x = random(5, D), random(4, 5)
    new = center_writing_weights(W)
    close((x @ new).mean(-1), torch.zeros(4, dtype=torch.float64))
    close(F.layer_norm(x @ new, (D,)), F.layer_norm(x @ W, (D,)))


def test_center_unembed() -> None:
    W, x = random(D, 7), random(4, D)
    new = center_unembed(W)
    close((x @ new).log_softmax(-1), (x @ W).log_softmax(-1))
    close((x @ new).mean(-1), torch.zeros(4, dtype=torch.float64))
    close(center_unembed(W[:, :3], W.mean(-1, keepdim=True)), new[:, :3])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fold_value_biases(kv_heads: int) -> None:
    b_V, W_O, v = random(kv_heads, 3), random(4, 3, D), random(5, 4, 3)
    pattern = random(4, 5, 5).softmax(-1)
    each = b_V.repeat_interleave(4 // kv_heads, 0)

    def out(values: Tensor) -> Tensor:
        return torch.einsum("hqk,khd,hdm->qm", pattern, values, W_O)

    close(out(v) + fold_value_biases(b_V, W_O), out(v + each))


@pytest.mark.parametrize("d_head", [1, 3, D])
def test_refactor_query_key(d_head: int) -> None:
    W_Q, b_Q, W_K, b_K = (
        random(2, D, d_head),
        random(2, d_head),
        random(2, D, d_head, seed=1),
        random(2, d_head, seed=1),
    )
    x = random(4, D)

    def scores(W_Q: Tensor, b_Q: Tensor, W_K: Tensor, b_K: Tensor) -> Tensor:
        return (x @ W_Q + b_Q.unsqueeze(1)) @ (x @ W_K + b_K.unsqueeze(1)).mT

    new = refactor_query_key(W_Q, b_Q, W_K, b_K)
    close(scores(*new), scores(W_Q, b_Q, W_K, b_K))
    query, key = (torch.cat([W, b.unsqueeze(1)], 1) for W, b in (new[:2], new[2:]))
    close(query.mT @ query, key.mT @ key)
    gram = query.mT @ query
    close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)))


def test_refactor_value_output() -> None:
    W_V, W_O = random(2, D, 3), random(2, 3, D)
    values, output = refactor_value_output(W_V, W_O)
    close(values @ output, W_V @ W_O)
    close(output @ output.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(Exception, match="d_model"):
        fold_layer_norm(random(D, 3), random(D - 1))
