"""Layers that read the keys and values of an earlier one (Gemma 4's small models): their points,
and the source's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapters import verify
from adapters.proofs.scores import SCORES
from bridge import TransformerBridge
from bridge.patching import get_act_patch_resid_pre
from tests.adapters.mutations import mutations, tried
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
#: Blocks 4 and 5 make the keys that 6 and 7 read; every other block has a window.
KINDS = ["sliding_attention", "full_attention"] * 4


def as_released() -> PreTrainedModel:
    """Shared keys and per-layer inputs, which tiny models of other tests leave out."""
    return tiny_model(
        "gemma4_text",
        num_hidden_layers=8,
        num_kv_shared_layers=2,
        layer_types=KINDS,
        sliding_window=4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99,
        head_dim=8,
        global_head_dim=8,
        attn_implementation="eager",
    )


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge(as_released())


@torch.no_grad()
def test_each_layer_has_its_own_queries_scores_and_pattern(bridge: TransformerBridge) -> None:
    assert not bridge.offered().not_offered and verify(bridge).passed
    patterns = bridge.core(TOKENS, output_attentions=True).attentions
    _, cache = bridge.run_with_cache(TOKENS)
    for layer in range(8):
        at = f"blocks.{layer}.attn.hook_"
        assert all(at + name in cache for name in ("q", "rot_q", "attn_scores", "pattern", "z"))
        torch.testing.assert_close(cache[f"{at}pattern"], patterns[layer])


@torch.no_grad()
def test_keys_and_values_are_the_points_of_who_makes_them(bridge: TransformerBridge) -> None:
    _, cache = bridge.run_with_cache(TOKENS)
    assert "blocks.6.attn.hook_k" not in bridge.hook_dict
    for letter in "kv":
        assert torch.equal(
            cache[f"blocks.7.attn.hook_{letter}"], cache[f"blocks.5.attn.hook_{letter}"]
        )
    double = [("blocks.7.attn.hook_v", lambda x, hook: x * 2)]
    layers = bridge.core.model.layers

    def doubled(module: object, args: object, output: Tensor) -> Tensor:
        return output * 2

    handle = layers[5].self_attn.v_proj.register_forward_hook(doubled)
    expected = bridge.core(TOKENS).logits
    handle.remove()
    torch.testing.assert_close(bridge.run_with_hooks(TOKENS, fwd_hooks=double), expected)
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(8)]
    with bridge.hooks(fwd_hooks=[("blocks.4.attn.hook_k", lambda x, hook: x.roll(1, 1))]):
        _, edited = bridge.run_with_cache(TOKENS, names_filter=names)
    changed = [not torch.equal(edited[name], cache[name]) for name in names]
    assert changed[:4] == [False] * 4 and changed[4] and changed[6]


def test_a_layer_without_keys_of_its_own_has_no_matrix_of_them(bridge: TransformerBridge) -> None:
    assert "blocks.6.attn.W_Q" in bridge.weights.getters
    assert not {"blocks.6.attn._W_K", "blocks.6.attn._W_V"} & bridge.weights.getters.keys()


@torch.no_grad()
def test_a_run_from_a_layer_on_is_given_the_tokens_and_all_keys(bridge: TransformerBridge) -> None:
    logits = bridge(TOKENS)
    for layer in (0, 1, 4):
        stream = bridge(TOKENS, stop_at_layer=layer)
        assert torch.equal(bridge(stream, start_at_layer=layer, input_ids=TOKENS), logits)
    assert torch.equal(bridge(bridge(TOKENS, stop_at_layer=8), start_at_layer=8), logits)
    with pytest.raises(
        ValueError, match=r"the blocks of \w+ read the tokens, too .*input_ids=tokens"
    ):
        bridge(stream, start_at_layer=4)
    with pytest.raises(
        ValueError, match="block 6 reads the keys and values of block 4, which does not run"
    ):
        bridge(stream, start_at_layer=5, input_ids=TOKENS)
    with pytest.raises(ValueError, match=r"input_ids are \[2, 11\], and the residual stream is of"):
        bridge(stream, start_at_layer=4, input_ids=TOKENS[:, 1:])


@torch.no_grad()
def test_patches_are_those_of_whole_runs(bridge: TransformerBridge) -> None:
    _, clean = bridge.run_with_cache(TOKENS)
    corrupted = TOKENS.flip(1)
    found = get_act_patch_resid_pre(
        bridge, corrupted, clean, lambda logits: logits[:, -1, 5].mean()
    )

    def patch(x: Tensor, hook: object) -> Tensor:
        x[:, 3] = clean["blocks.6.hook_resid_pre"][:, 3]
        return x

    expected = bridge.run_with_hooks(corrupted, fwd_hooks=[("blocks.6.hook_resid_pre", patch)])[
        :, -1, 5
    ].mean()
    torch.testing.assert_close(found[6, 3], expected)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ("makes its own keys", "what the declaration names is there"),
        ("keys of the block before", SCORES),
    ],
)
def test_keys_of_another_block_than_its_source_are_refused(change: str, claim: str) -> None:
    model = as_released()
    wrong = next(
        each for each in mutations(model) if each.name == f"blocks: layer 6: Attention: {change}"
    )
    report = tried(model, wrong)
    assert not isinstance(report, Exception)
    assert claim in {check.name for check in report.failed}, str(report)
