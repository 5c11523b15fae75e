"""A metric that reads one position of all rows is refused where that position is padding."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.circuits import (
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    kl_divergence,
    logit_difference,
    node_effects,
    path_patching,
)
from bridge.features import feature_attribution
from bridge.patching import get_act_patch_resid_pre
from bridge.tasks import embedded_pairs


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


@pytest.fixture(scope="module")
def padded(bridge):
    pairs = embedded_pairs(bridge, "ioi", 2)
    behind = torch.full((2, 2), bridge.tokenizer.eos_token_id)
    clean, corrupted = (torch.cat([x, behind], 1) for x in (pairs.clean, pairs.corrupted))
    mask = torch.ones_like(clean)
    mask[:, -2:] = 0
    return pairs, clean, corrupted, mask


def studies(bridge, clean, corrupted, metric, mask):
    both = (bridge, clean, corrupted, metric)
    cache = bridge.run_with_cache(clean, attention_mask=mask)[1]
    yield lambda: edge_attribution(*both, attention_mask=mask)
    yield lambda: node_effects(*both, attention_mask=mask)
    yield lambda: edge_effects(*both, ["embed->logits"], attention_mask=mask, verbose=False)
    yield lambda: path_patching(*both, ["L2H1"], ["logits"], attention_mask=mask)
    yield lambda: feature_attribution(
        bridge, clean, metric, "blocks.0.hook_resid_post", attention_mask=mask
    )
    yield lambda: get_act_patch_resid_pre(
        bridge, corrupted, cache, metric, attention_mask=mask, verbose=False
    )


@pytest.mark.parametrize("study", range(6))
def test_a_padded_position_is_refused(bridge, padded, study):
    pairs, clean, corrupted, mask = padded
    metric = pairs.metric()
    with pytest.raises(ValueError, match="position -1, which is padding in row 0"):
        list(studies(bridge, clean, corrupted, metric, mask))[study]()
    last = logit_difference(pairs.answers, pairs.wrong, mask.sum(-1) - 1)
    list(studies(bridge, clean, corrupted, last, mask))[study]()


def test_a_position_of_each_row_gives_the_numbers_of_unpadded_prompts(bridge, padded):
    pairs, clean, corrupted, mask = padded
    scores = edge_attribution(bridge, pairs.clean, pairs.corrupted, pairs.metric())
    last = logit_difference(pairs.answers, pairs.wrong, mask.sum(-1) - 1)
    of_padded = edge_attribution(bridge, clean, corrupted, last, attention_mask=mask)
    torch.testing.assert_close(of_padded.values, scores.values, atol=1e-4, rtol=1e-4)


def test_a_divergence_reads_a_position_too(bridge, padded):
    _, clean, corrupted, mask = padded
    metric = kl_divergence(bridge(clean, attention_mask=mask))
    scores = edge_attribution(
        bridge,
        clean,
        corrupted,
        kl_divergence(bridge(clean), mask.sum(-1) - 1),
        method="inputs",
        attention_mask=mask,
    )
    with pytest.raises(ValueError, match="which is padding in row 0"):
        faithfulness_curve(scores, bridge, clean, corrupted, metric, attention_mask=mask)
