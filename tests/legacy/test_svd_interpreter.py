"""`SVDInterpreter` with HookedTransformer's arguments and words."""

import pytest
import torch

from bridge.analysis import svd
from bridge.legacy import SVDInterpreter
from bridge.legacy.SVDInterpreter import OUTPUT_EMBEDDING


def test_a_head_of_the_mlp_does_not_count(model):
    plain, legacy = svd.SVDInterpreter(model), SVDInterpreter(model)
    for kind in ("w_in", "w_out"):
        right = plain.get_singular_vectors(kind, 1, 4)
        assert torch.equal(
            legacy.get_singular_vectors(kind, layer_index=1, num_vectors=4, head_index=0), right
        )
        assert torch.equal(legacy.get_singular_vectors(kind, 1, 4), right)
    assert torch.equal(
        legacy.get_singular_vectors("OV", 1, 4, 2), plain.get_singular_vectors("OV", 1, 4, 2)
    )
    assert torch.equal(model.tl_parameters()[OUTPUT_EMBEDDING], model.W_U)


def test_what_there_is_not(model):
    legacy, layers, heads = SVDInterpreter(model), model.cfg.n_layers, model.cfg.n_heads
    for kind in ("OV", "w_in", "w_out"):
        with pytest.raises(AssertionError) as error:
            legacy.get_singular_vectors(kind, layer_index=layers, head_index=0)
        assert (
            str(error.value) == f"Layer index must be between 0 and {layers - 1} but got {layers}"
        )
    with pytest.raises(AssertionError) as error:
        legacy.get_singular_vectors("OV", layer_index=0, head_index=heads)
    assert str(error.value) == f"Head index must be between 0 and {heads - 1} but got {heads}"
    with pytest.raises(AssertionError, match="OV needs a head"):
        legacy.get_singular_vectors("OV", layer_index=0)
    with pytest.raises(AssertionError, match="the vector type is 'OQ'"):
        legacy.get_singular_vectors("OQ", layer_index=0)
