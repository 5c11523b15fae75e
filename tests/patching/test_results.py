"""Patching with a metric for each prompt, with several metrics, and beside the unpatched run:
against plain hooks.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.patching import (
    PatchingResult,
    generic_activation_patch,
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_block_every,
    get_act_patch_resid_pre,
    layer_pos_patch_setter,
)
from tests.conftest import tiny

CLEAN = torch.randint(0, 61, (3, 5), generator=torch.Generator().manual_seed(3))
CORRUPTED = torch.cat([CLEAN[:, :1], (CLEAN[:, 1:2] + 5) % 61, CLEAN[:, 2:]], 1)


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny("gpt2"))


@pytest.fixture(scope="module")
def cache(bridge):
    return bridge.run_with_cache(CLEAN)[1]


def difference(logits):
    return logits[:, -1, 4] - logits[:, -1, 9]


def likeliest(logits):
    return logits[:, -1].log_softmax(-1)[:, 7]


@pytest.fixture(scope="module")
def by_hand(bridge, cache):
    """``[metric, layer, pos, batch]``, by one run with a plain hook for each patch."""
    found = torch.zeros(2, 3, 5, 3)
    for layer in range(3):
        name = f"blocks.{layer}.hook_resid_pre"
        for pos in range(5):

            def put(x, hook, pos=pos):
                x[:, pos] = cache[hook.name][:, pos]
                return x

            logits = bridge.run_with_hooks(CORRUPTED, fwd_hooks=[(name, put)])
            found[:, layer, pos] = torch.stack([difference(logits), likeliest(logits)]).detach()
    return found


def test_a_number_for_each_prompt(bridge, cache, by_hand):
    found = get_act_patch_resid_pre(
        bridge, CORRUPTED, cache, difference, reduce="none", baseline=True, verbose=False
    )
    assert (
        found.values.shape == (3, 5, 3)
        and found.axis_names == ["layer", "pos"]
        and not found.reduced
    )
    torch.testing.assert_close(found.values, by_hand[0], atol=1e-5, rtol=0)
    before, clean = difference(bridge(CORRUPTED)), difference(bridge(CLEAN))
    torch.testing.assert_close(found.baseline, before, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.effect(), by_hand[0] - before, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.mean(), by_hand[0].mean(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.stderr(), by_hand[0].std(-1) / 3**0.5, atol=1e-5, rtol=0)
    share = found.normalized(clean)
    torch.testing.assert_close(
        share[0, 1], torch.ones(3), atol=1e-3, rtol=0
    )  # where the prompts differ
    assert share[0, 0].abs().max() < 1e-3
    mean = get_act_patch_resid_pre(
        bridge, CORRUPTED, cache, difference, reduce="mean", verbose=False
    )
    torch.testing.assert_close(mean, by_hand[0].mean(-1), atol=1e-5, rtol=0)


def test_several_metrics_of_each_run(bridge, cache, by_hand):
    metrics = {"difference": difference, "likeliest": likeliest}
    found = get_act_patch_resid_pre(
        bridge, CORRUPTED, cache, metrics, reduce="none", baseline=True, verbose=False
    )
    torch.testing.assert_close(found.values, by_hand, atol=1e-5, rtol=0)
    assert found.baseline.shape == (2, 3) and found.effect().shape == by_hand.shape
    one = found["likeliest"]
    torch.testing.assert_close(one.effect(), found.effect()[1])
    assert one["likeliest"] is one and one.metric_names == ["likeliest"]
    averaged = get_act_patch_resid_pre(
        bridge, CORRUPTED, cache, metrics, reduce="mean", verbose=False
    )
    torch.testing.assert_close(averaged.values, by_hand.mean(-1), atol=1e-5, rtol=0)
    assert averaged.reduced and averaged.baseline is None
    heads = get_act_patch_attn_head_out_all_pos(
        bridge, CORRUPTED, cache, metrics, reduce="none", verbose=False
    )
    assert heads.values.shape == (2, 3, 4, 3)


def test_what_cannot_be(bridge, cache):
    def sweep(metric=difference, **options):
        return get_act_patch_resid_pre(bridge, CORRUPTED, cache, metric, verbose=False, **options)

    for options, said in (
        ({}, "must be a single number, or reduce='none'"),
        ({"metric": {}}, "empty mapping"),
        ({"reduce": "none", "return_index_df": True}, "has the data frame as index_df"),
        ({"reduce": "none", "metric": lambda logits: logits[0, 0, 0]}, r"shape \[\]; with reduce"),
    ):
        with pytest.raises(ValueError, match=said):
            sweep(**options)
    with pytest.raises(TypeError, match="reduce"):
        sweep(reduce="sum")
    with pytest.raises(TypeError, match="one by one"):
        get_act_patch_block_every(
            bridge, CORRUPTED, cache, difference, reduce="none", verbose=False
        )
    found = sweep(reduce="none")
    for ask, said in (
        (found.effect, "use baseline=True"),
        (sweep(reduce="mean", baseline=True).stderr, "were not averaged"),
        (
            lambda: sweep(reduce="none", baseline=True).normalized(torch.ones(2)),
            r"\[2\]; the corrupted run's \[3\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            ask()
    with pytest.raises(KeyError, match="no metric 'other'; there are metric"):
        found["other"]
    with pytest.raises(AttributeError, match=r"no 'bootstrap_ci'\. Use scipy"):
        _ = found.bootstrap_ci


def test_rows_of_a_data_frame(bridge, cache, by_hand):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[0, 1], [1, 4]], columns=["layer", "pos"])
    found = generic_activation_patch(
        bridge,
        CORRUPTED,
        cache,
        difference,
        layer_pos_patch_setter,
        "resid_pre",
        None,
        frame,
        reduce="none",
        verbose=False,
    )
    torch.testing.assert_close(
        found.values, torch.stack([by_hand[0, 0, 1], by_hand[0, 1, 4]]), atol=1e-5, rtol=0
    )
    assert found.index_df is frame and isinstance(found, PatchingResult)
    whole = get_act_patch_resid_pre(
        bridge, CORRUPTED, cache, difference, reduce="none", verbose=False
    )
    assert whole.index_df.shape == (15, 2) and list(whole.index_df.columns) == ["layer", "pos"]
