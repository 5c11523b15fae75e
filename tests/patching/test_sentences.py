"""Suppressed sentences and continuations from a sentence, beside computations by hand and beside
thought-anchors' functions, written again in float64.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from bridge import TransformerBridge
from bridge.analysis.patterns import PatternStatistics, kurtosis, vertical_scores
from bridge.interventions import Zero
from bridge.patching import rollouts, suppression
from tests.tiny_models import tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
TEXT = (
    "Mary and John went to the store. John gave a drink to Mary. Then Mary went to the park. There"
    " Mary and John had a cake. Mary gave the cake to John. John was in the park."
)
CHAT = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def bridge():
    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = TEMPLATE
    return bridge


def masked_logits(bridge, tokens, span):
    """The logits with a mask of transformers' own: later tokens do not attend to a span."""
    n = tokens.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    allowed[span.end :, span.start : span.end] = False
    with torch.no_grad():
        return bridge.original_model(tokens, attention_mask=allowed[None, None]).logits


def by_hand(bridge, spans, log, temperature=0.6):
    """The divergences in float64, from logits with masks of transformers' own."""
    tokens = spans.tokens
    with torch.no_grad():
        before = bridge.original_model(tokens).logits[0].double() / temperature
    result = np.full((len(spans), len(spans)), np.nan)
    for column, suppressed in enumerate(spans):
        after = masked_logits(bridge, tokens, suppressed)[0].double() / temperature
        p, q = before.log_softmax(-1), after.log_softmax(-1)
        divergences = (p.exp() * (p - q)).sum(-1).clamp(min=0).numpy()
        values = np.log(divergences + 1e-9) if log else divergences
        for row in range(column + 1, len(spans)):
            result[row, column] = values[spans[row].start : spans[row].end].mean()
    return result


@pytest.mark.parametrize("log", [True, False])
def test_suppression_is_that_of_a_mask_of_transformers(bridge, log):
    spans = bridge.spans(CHAT).sentences()
    assert len(spans) == 6
    expected = by_hand(bridge, spans, log)
    values = suppression(bridge, CHAT, log=log)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(np.isnan(expected), ~np.tril(np.ones((6, 6), bool), -1))
    some = suppression(bridge, spans[1:4], log=log, temperature=1.0)
    expected = by_hand(bridge, spans[1:4], log, 1.0)
    np.testing.assert_allclose(some.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "gpt_neox", "bloom"])
def test_suppression_of_other_attentions(bridge, family):
    """Sliding windows, soft caps, ALiBi, positions in the embedding: masked is not read."""
    model = tiny_model(family, "causal")
    other = TransformerBridge(model, bridge.tokenizer)
    spans = bridge.spans(CHAT)[2:].sentences()
    spans._layout.ids[:] = [token % other.cfg.d_vocab for token in spans._layout.ids]
    values = suppression(other, spans, log=False)
    assert bool((values[1:, 0] > 0).any()) and not bool(values.tril(-1).isnan().any())
    # Other tokens in a sentence change nothing behind it, except in the divergence's first run.
    spans._layout.ids[spans[0].start] = 5
    assert suppression(other, spans, log=False).shape == values.shape


@pytest.mark.parametrize("family", ["mamba", "t5", "bert", "jamba"])
def test_models_that_carry_text_otherwise_are_refused(bridge, family):
    task = {"t5": "seq2seq", "bert": "masked"}.get(family, "causal")
    other = TransformerBridge(tiny_model(family, task), bridge.tokenizer)
    spans = bridge.spans(CHAT)
    spans._layout.ids[:] = [token % other.cfg.d_vocab for token in spans._layout.ids]
    with pytest.raises(ValueError, match="no causal decoder|cannot be masked|carries tokens"):
        suppression(other, spans.sentences())
