"""circuitsvis: pictures of patterns and of tokens, of what a cache holds."""

import json
import re

import circuitsvis as cv
import pytest
import torch


def test_patterns(model):
    text = "When Mary and John went to the store"
    _, cache = model.run_with_cache(text, remove_batch_dim=True)
    pattern = cache["pattern", 1]
    shown = str(
        cv.attention.attention_patterns(tokens=model.to_str_tokens(text), attention=pattern)
    )
    numbers = json.loads(re.search(r'"attention":\s*(\[\[\[.*?\]\]\])', shown)[1])
    assert torch.allclose(torch.tensor(numbers), pattern, atol=1e-3)
    assert " store" in shown


def test_tokens(model):
    text = "Mary and John"
    _, cache = model.run_with_cache(text, remove_batch_dim=True)
    values = cache["post", 1][:, 3]
    shown = str(cv.tokens.colored_tokens(model.to_str_tokens(text), values))
    assert " John" in shown
    logits = model(text)
    shown = str(
        cv.logits.token_log_probs(
            model.to_tokens(text)[0], logits[0].log_softmax(-1), model.to_string
        )
    )
    right = logits[0, :-1].log_softmax(-1).gather(1, model.to_tokens(text)[0, 1:, None])[:, 0]
    found = json.loads(re.search(r'"correctTokenLogProb": (\[.*?\])', shown)[1])
    assert found == pytest.approx(right.tolist(), abs=1e-3)
