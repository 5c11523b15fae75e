"""Interchange interventions and patching, against what pyvene 0.1.8 and TransformerLens 4.3 made of
the same models.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridge import TransformerBridge
from bridge.bases import Basis, Directions, Rotation
from bridge.features import interchange
from bridge.patching import (
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_mlp_out,
    get_act_patch_resid_pre,
)
from tests.reference import DATA

THEIRS = load_file(DATA.parent / "interchange" / "interchange.safetensors")
BASE, SOURCE, POS, RANK = THEIRS["base"], THEIRS["source"], 3, 5
POINTS = ("blocks.0.hook_resid_post", "blocks.0.hook_mlp_out")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def bridge(family: str) -> TransformerBridge:
    return TransformerBridge(AutoModelForCausalLM.from_pretrained(DATA / family).eval())


def changed(
    bridge: TransformerBridge, point: str, basis: Basis, features: Tensor | None = None
) -> Tensor:
    """The logits with coordinates of the sources."""
    with torch.no_grad(), bridge.basis(point, "own", basis) as own:
        return interchange(bridge, BASE, SOURCE, own, position=POS, features=features)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("point", POINTS)
def test_pyvene(bridge: TransformerBridge, family: str, point: str) -> None:
    theirs = {
        name: THEIRS[f"{family}/pyvene/{point}/{name}"] for name in ("all", "rotated", "low_rank")
    }
    rotation, columns = (
        THEIRS[f"{family}/pyvene/{point}/{name}"] for name in ("rotation", "columns")
    )
    with torch.no_grad():
        assert close(interchange(bridge, BASE, SOURCE, point, position=POS), theirs["all"])
    assert close(changed(bridge, point, Rotation(32)), theirs["all"]), (
        "a full basis is activation patching"
    )
    some = changed(bridge, point, Directions(rotation, orthonormal=True), torch.arange(RANK))
    assert close(some, theirs["rotated"])
    assert close(changed(bridge, point, Directions(columns, orthonormal=True)), theirs["low_rank"])
    plain = bridge.original_model(BASE).logits
    assert all(not torch.allclose(value, plain, atol=1e-3) for value in theirs.values())


@pytest.mark.parametrize("point", POINTS)
def test_transformer_lens(bridge: TransformerBridge, family: str, point: str) -> None:
    columns = THEIRS[f"{family}/transformer_lens/columns"]
    found = changed(bridge, point, Directions(columns, orthonormal=True))
    assert close(found, THEIRS[f"{family}/transformer_lens/{point}"])


@torch.no_grad()
def test_patching_of_transformer_lens(bridge: TransformerBridge, family: str) -> None:
    _, cache = bridge.run_with_cache(SOURCE[:1])
    patches = {
        "resid_pre": get_act_patch_resid_pre,
        "mlp_out": get_act_patch_mlp_out,
        "head_out": get_act_patch_attn_head_out_all_pos,
    }
    for name, patch in patches.items():
        found = patch(bridge, BASE[:1], cache, lambda logits: logits[0, -1, 7] - logits[0, -1, 9])
        right = THEIRS[f"{family}/patching/{name}"]
        assert close(found, right) and right.std() > 1e-3
