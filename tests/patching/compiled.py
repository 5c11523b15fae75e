"""Sweeps through one compiled program give what sweeps by runs give."""

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from bridge import patching as ready
from tests.conftest import tiny

EAGER = {"backend": "eager"}


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 9]).mean()


@pytest.fixture
def pair(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, torch.cat([tokens[:, :1], (tokens[:, 1:3] + 7) % 61, tokens[:, 3:]], dim=1)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "resid_pre"), ("gpt_neox", "mlp_out"), ("gpt_neox", "attn_head_k_all_pos"),
        ("llama", "attn_head_pattern_all_pos"),
    ],
    indirect=["family"],
)  # fmt: skip
def test_it_equals_the_other_sweep(bridge: TransformerBridge, pair: tuple[Tensor, Tensor], kind: str) -> None:
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    patch = getattr(ready, f"get_act_patch_{kind}")
    right = patch(bridge, corrupted, cache, metric, verbose=False)
    # A number that does not divide the patches: the last batch is filled up.
    made = patch(bridge, corrupted, cache, metric, verbose=False, compiled=EAGER, patches_per_run=5)
    torch.testing.assert_close(made, right, rtol=1e-4, atol=1e-5)
    assert right.std() > 1e-4


def test_it_compiles_once(pair: tuple[Tensor, Tensor]) -> None:
    bridge, (clean, corrupted) = TransformerBridge(tiny("llama")), pair
    _, cache = bridge.run_with_cache(clean)
    compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        nonlocal compiled
        compiled += 1
        return graph.forward

    ready.get_act_patch_resid_pre(
        bridge, corrupted, cache, metric, verbose=False, compiled={"backend": backend}, patches_per_run=4
    )
    assert compiled == 1


def test_padding_in_front(pair: tuple[Tensor, Tensor]) -> None:
    bridge, (clean, corrupted) = TransformerBridge(tiny("llama")), pair
    mask = torch.ones_like(clean)
    mask[1, :3] = 0
    _, cache = bridge.run_with_cache(clean, attention_mask=mask)
    right, made = (
        ready.get_act_patch_attn_head_out_all_pos(
            bridge, corrupted, cache, metric, verbose=False, attention_mask=mask, **options
        )
        for options in ({}, {"compiled": EAGER})
    )
    torch.testing.assert_close(made, right, rtol=1e-4, atol=1e-5)
