"""Singular vectors have their defining property, whatever algorithm found them; and the errors."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.analysis.svd import SVDInterpreter
from bridge.arguments import CannotBeDoneError
from tests.conftest import tiny


def through_the_unembedding(matrix, bridge, n):
    """Right singular vectors as eigenvectors of ``matrix.T @ matrix``, in float64, through the
    unembedding.
    """
    values, vectors = torch.linalg.eigh(matrix.double().mT @ matrix.double())
    best = values.argsort(descending=True)[:n]
    return vectors[:, best].mT @ bridge.W_U.double(), values[best]


def assert_same_directions(ours, right):
    """Equal but for the sign."""
    assert ours.shape == (right.shape[1], 1, right.shape[0])
    for vector, expected in zip(ours[:, 0].mT.double(), right, strict=True):
        sign = torch.sign(vector @ expected)
        torch.testing.assert_close(vector * sign, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("processed", [False, True])
def test_vectors_are_the_matrices_own(bridge, processed):
    if processed:
        bridge.process_weights()
    svd = SVDInterpreter(bridge)
    for layer in (0, 2):
        block, state = bridge.blocks[layer], bridge.tl_parameters()
        for head in (0, 3):  # with grouped values, the head's group
            right, _ = through_the_unembedding(
                block.attn.W_V[head] @ block.attn.W_O[head], bridge, 3
            )
            assert_same_directions(svd.get_singular_vectors("OV", layer, 3, head), right)
        norm = state[f"blocks.{layer}.ln2.w"]
        assert bool((norm == 1).all()) is processed
        right, _ = through_the_unembedding(block.mlp.W_in.mT * norm, bridge, 3)
        assert_same_directions(svd.get_singular_vectors("w_in", layer, num_vectors=3), right)
        right, _ = through_the_unembedding(block.mlp.W_out, bridge, 3)
        assert_same_directions(svd.get_singular_vectors("w_out", layer, num_vectors=3), right)


def test_all_vectors_can_be_had_and_no_more(bridge):
    svd = SVDInterpreter(bridge)
    assert svd.get_singular_vectors("w_out", 1).shape == (61, 1, 10)
    assert svd.get_singular_vectors("w_out", 1, 32).shape == (61, 1, 32)
    assert svd.get_singular_vectors("OV", 1, 8, 0).shape == (61, 1, 8)
    for arguments in (("w_out", 1, 33), ("w_in", 1, 0), ("OV", 1, 9, 0)):
        with pytest.raises(CannotBeDoneError, match="num_vectors is"):
            svd.get_singular_vectors(*arguments)


def test_half_precision_is_computed_in_float32():
    svd = SVDInterpreter(TransformerBridge(tiny("llama", dtype=torch.bfloat16)))
    exact = SVDInterpreter(TransformerBridge(tiny("llama", dtype=torch.bfloat16).float()))
    for kind, head in (("OV", 1), ("w_in", None), ("w_out", None)):
        ours = svd.get_singular_vectors(kind, 0, 2, head)
        assert ours.dtype == torch.float32 and not ours.requires_grad
        torch.testing.assert_close(
            ours.abs(), exact.get_singular_vectors(kind, 0, 2, head).abs(), atol=2e-2, rtol=0
        )


def test_errors(bridge):
    svd = SVDInterpreter(bridge)
    for kind in (ValueError, AssertionError):  # HookedTransformer's are assertions
        with pytest.raises(kind, match="the vector type is 'QK'"):
            svd.get_singular_vectors("QK", 0)
        with pytest.raises(kind, match=r"Layer index must be between 0 and 2 but got 3"):
            svd.get_singular_vectors("w_in", 3)
        with pytest.raises(kind, match="Layer index must be between 0 and 2 but got -1"):
            svd.get_singular_vectors("w_out", -1)
        with pytest.raises(kind, match="OV needs a head"):
            svd.get_singular_vectors("OV", 0)
        with pytest.raises(kind, match="w_in and w_out have none"):
            svd.get_singular_vectors("w_in", 0, head_index=1)
        with pytest.raises(kind, match=r"Head index must be between 0 and 3 but got 4"):
            svd.get_singular_vectors("OV", 0, head_index=4)
