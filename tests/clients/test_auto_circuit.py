"""auto-circuit: a model whose edges can be patched, ACDC, and edge attribution scores."""

import json
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
import transformer_lens

for _name in ("tracr.compiler", "tracr.compiler.compiling", "tracr.rasp", "tracr.rasp.rasp"):
    sys.modules.setdefault(
        _name, MagicMock(spec=ModuleType)
    )  # compiled programs, which are another thing

from auto_circuit.data import load_datasets_from_json
from auto_circuit.prune import run_circuits
from auto_circuit.prune_algos.ACDC import acdc_prune_scores
from auto_circuit.prune_algos.edge_attribution_patching import (
    edge_attribution_patching_prune_scores,
)
from auto_circuit.prune_algos.mask_gradient import mask_gradient_prune_scores
from auto_circuit.types import PatchType
from auto_circuit.utils.graph_utils import patchable_model
from auto_circuit.visualize import draw_seq_graph

EXAMPLES = [
    ("When Mary and John went to the store, John gave a drink to", " Mary", " John"),
    ("When Sarah and Tom went to the park, Tom gave a ball to", " Sarah", " Tom"),
]


def tiny(name):
    """A model of two layers with the tokenizer of the model in the package."""
    config = transformer_lens.HookedTransformerConfig(
        n_layers=2,
        d_model=8,
        n_ctx=32,
        n_heads=2,
        d_head=4,
        act_fn="gelu",
        tokenizer_name=name,
        device="cpu",
        seed=1,
    )
    model = transformer_lens.HookedTransformer(config)
    model.init_weights()
    for field in ("use_attn_result", "use_attn_in", "use_split_qkv_input", "use_hook_mlp_in"):
        setattr(model.cfg, field, True)
    return model


@pytest.fixture
def patchable(name):
    return patchable_model(tiny(name), factorized=True, slice_output="last_seq", separate_qkv=True)


@pytest.fixture
def loader(patchable, tmp_path):
    prompts = [
        {
            "clean": text,
            "corrupt": text.replace(right, wrong, 1),
            "answers": [right],
            "wrong_answers": [wrong],
        }
        for text, right, wrong in EXAMPLES
    ]
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": prompts}))
    found, _ = load_datasets_from_json(
        model=patchable,
        path=path,
        device=torch.device("cpu"),
        prepend_bos=True,
        batch_size=2,
        train_test_size=(2, 0),
        return_seq_length=False,
        tail_divergence=False,
    )
    return found


def test_patching_nothing_and_everything(name, patchable, loader):
    plain, batch = tiny(name), next(iter(loader))
    clean, corrupt = (plain(x)[:, -1] for x in (batch.clean, batch.corrupt))
    assert torch.allclose(patchable(batch.clean)[patchable.out_slice], clean, atol=1e-5)
    scores = {
        module: torch.ones_like(wrapper.patch_mask) for module, wrapper in _masks(patchable).items()
    }
    n = patchable.n_edges
    found = run_circuits(patchable, loader, [0, n], scores, patch_type=PatchType.EDGE_PATCH)
    key = next(iter(found[0]))
    assert torch.allclose(found[0][key], corrupt, atol=1e-4)
    assert torch.allclose(found[n][key], clean, atol=1e-4), (
        "with every edge of the clean run, it is the clean run"
    )
    assert not torch.allclose(clean, corrupt, atol=1e-3)


def _masks(model):
    return {wrapper.module_name: wrapper for wrapper in model.dest_wrappers}


def test_edge_attribution_scores_are_the_masks_gradients(patchable, loader):
    scores = edge_attribution_patching_prune_scores(
        patchable, loader, official_edges=None, answer_diff=True
    )
    gradients = mask_gradient_prune_scores(
        patchable,
        loader,
        official_edges=None,
        grad_function="logit",
        answer_function="avg_diff",
        mask_val=0.0,
    )
    assert scores.keys() == gradients.keys()
    assert max(float(score.abs().max()) for score in scores.values()) > 1e-4
    for module, score in scores.items():
        assert torch.allclose(score, gradients[module], atol=1e-5)


def test_acdc_agrees_with_its_own_check(patchable, loader):
    # The order of its edges changes with the hash seed. With a larger threshold some orders remove
    # every edge, and then its check fails in itself: it takes the first of an empty list of edge
    # counts.
    scores = acdc_prune_scores(
        patchable,
        loader,
        None,
        tao_exps=[-5],
        tao_bases=[1],
        test_mode=True,
        run_circuits_ref=run_circuits,
        show_graphs=False,
        draw_seq_graph_ref=draw_seq_graph,
    )
    left = sum(int(score.isinf().sum()) for score in scores.values())
    assert 0 < left < patchable.n_edges, "some edges are removed, and some are not"
