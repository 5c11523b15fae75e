"""A notebook that looks for kinds of heads by name and by patterns of its own."""

import pytest
import torch

from bridge.embedded import prompts
from bridge.legacy import utils
from bridge.legacy.head_detector import (
    compute_head_attention_similarity_score,
    detect_head,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
    get_supported_heads,
)
from bridge.legacy.SVDInterpreter import SVDInterpreter

SENTENCE = "When Mary and John went to the store, John gave a drink to Mary."


def test_supported_heads(capsys):
    get_supported_heads()
    assert "previous_token_head" in capsys.readouterr().out


def test_previous_token_heads(model):
    scores = detect_head(model, SENTENCE, "previous_token_head")
    assert scores.shape == (model.cfg.n_layers, model.cfg.n_heads)
    layer, head = divmod(scores.argmax().item(), model.cfg.n_heads)
    assert scores.max() > 0.5
    _, cache = model.run_with_cache(SENTENCE, remove_batch_dim=True)
    pattern = cache["pattern", layer][head]
    assert pattern.diagonal(-1).mean() > 0.5

    own = get_previous_token_head_detection_pattern(model.to_tokens(SENTENCE))
    assert utils.is_lower_triangular(own)
    again = detect_head(model, SENTENCE, own, heads={layer: [head]}, cache=cache)
    torch.testing.assert_close(again[layer, head], scores[layer, head])
    assert (again == -1).sum() == scores.numel() - 1
    score = compute_head_attention_similarity_score(
        pattern, own, exclude_bos=False, exclude_current_token=False, error_measure="mul"
    )
    assert score == pytest.approx(scores[layer, head].item(), abs=1e-5)


def test_induction_heads_over_several_texts(model):
    texts = [prompt.text for prompt in prompts("repeats", 3, seed=0)]
    scores = detect_head(model, texts, "induction_head", exclude_bos=True)
    layer, head = divmod(scores.argmax().item(), model.cfg.n_heads)
    for text in texts:
        tokens = model.to_tokens(text)
        _, cache = model.run_with_cache(tokens)
        stripes = get_induction_head_detection_pattern(tokens)
        repeats = stripes.sum(-1) > 0
        attention = (cache["pattern", layer][0, head] * stripes).sum(-1)[repeats]
        assert attention.mean() > 0.5
    assert (detect_head(model, texts, "duplicate_token_head") < 0.5)[layer, head]


def test_absolute_errors_are_stricter(model):
    options = {"exclude_bos": True, "exclude_current_token": True}
    by_share = detect_head(model, SENTENCE, "previous_token_head", **options)
    by_error = detect_head(model, SENTENCE, "previous_token_head", error_measure="abs", **options)
    assert (by_error <= 1).all() and by_error.argmax() == by_share.argmax()


def test_errors_are_assertions_as_before(model):
    with pytest.raises(AssertionError):
        detect_head(model, SENTENCE, "colour_head")
    with pytest.raises(AssertionError):
        detect_head(model, SENTENCE, torch.ones(3, 3))
    with pytest.raises(AssertionError):
        detect_head(model, "", "induction_head")


def test_what_a_head_writes_by_its_singular_vectors(model):
    vectors = SVDInterpreter(model).get_singular_vectors(
        "OV", layer_index=1, head_index=0, num_vectors=4
    )
    assert vectors.shape == (model.cfg.d_vocab, 1, 4)
    ov = model.OV[1, 0].AB
    direction = torch.linalg.svd(ov).Vh[0] @ model.W_U
    assert torch.cosine_similarity(vectors[:, 0, 0], direction, dim=0).abs() > 0.999
    assert len(model.to_str_tokens(vectors[:, 0, 0].topk(5).indices)) == 5
