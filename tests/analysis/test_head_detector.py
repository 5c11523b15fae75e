"""Head detection against attention patterns that are summed by hand, and its errors."""

import logging

import pytest
import torch

from bridge.analysis.head_detector import (
    DET_PAT_NOT_SQUARE_ERR,
    HEAD_NAMES,
    INVALID_HEAD_NAME_ERR,
    SEQ_LEN_ERR,
    compute_head_attention_similarity_score,
    detect_head,
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
)
from bridge.arguments import CannotBeDoneError
from bridge.cache import ActivationCache
from bridge.embedded import prompts

TEXT = "When Mary and John went to the store, John gave a drink to Mary"


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def repeated():
    """Words in an order without meaning, twice over."""
    words = prompts("repeats", 1, seed=3)[0]
    once = list(dict.fromkeys(words.text.split()))
    return "".join(f" {word}" for word in once * 2)


def patterns(bridge, text):
    _, cache = bridge.run_with_cache(text)
    return torch.stack([cache["pattern", layer][0] for layer in range(bridge.cfg.n_layers)])


def earlier(tokens, offset):
    """For each query, the keys that stand `offset` behind an earlier place of the query's token,
    one by one.
    """
    n = len(tokens)
    wanted = torch.zeros(n, n)
    for query in range(n):
        for place in range(query):
            if tokens[place] == tokens[query]:
                wanted[query, place + offset] = 1
    return wanted


def test_detection_patterns_by_hand():
    tokens = torch.tensor([[1, 5, 6, 5, 5, 6]])
    assert torch.equal(get_duplicate_token_head_detection_pattern(tokens), earlier(tokens[0], 0))
    assert torch.equal(get_induction_head_detection_pattern(tokens), earlier(tokens[0], 1))
    previous = get_previous_token_head_detection_pattern(tokens)
    assert previous.sum() == 5 and all(previous[i + 1, i] == 1 for i in range(5))


@pytest.mark.parametrize("exclude_bos", [False, True])
@pytest.mark.parametrize("exclude_current_token", [False, True])
@pytest.mark.parametrize("kind", HEAD_NAMES)
def test_scores_are_the_share_of_attention(
    embedded, repeated, kind, exclude_bos, exclude_current_token
):
    tokens = embedded.to_tokens(repeated)[0]
    n = len(tokens)
    wanted = {
        "previous_token_head": torch.diag(torch.ones(n - 1), -1),
        "duplicate_token_head": earlier(tokens, 0),
        "induction_head": earlier(tokens, 1),
    }[kind]
    counted = torch.ones(n, n)
    if exclude_bos:
        counted[:, 0] = 0
    if exclude_current_token:
        counted -= torch.eye(n) * counted
    attention = patterns(embedded, repeated)
    mine = {"exclude_bos": exclude_bos, "exclude_current_token": exclude_current_token}
    right = (attention * counted * wanted).sum((-1, -2)) / (attention * counted).sum((-1, -2))
    torch.testing.assert_close(detect_head(embedded, repeated, kind, **mine), right)
    torch.testing.assert_close(detect_head(embedded, repeated, wanted, **mine), right)
    right = 1 - ((attention - wanted).abs() * counted).sum(-1).mean(-1)
    ours = detect_head(embedded, repeated, kind, **mine, error_measure="abs")
    torch.testing.assert_close(ours, right, atol=6e-4, rtol=0)


def test_the_shipped_models_heads_are_found(embedded, repeated):
    """The heads that attend, by more than half, one token behind the earlier place, and those that
    look back by one.
    """
    tokens = embedded.to_tokens(repeated)[0]
    half = (len(tokens) - 1) // 2
    attention = patterns(embedded, repeated)
    later, places = torch.arange(half + 1, 2 * half), torch.arange(1, len(tokens))
    for kind, queries, keys in (
        ("induction_head", later, later - half + 1),
        ("previous_token_head", places, places - 1),
    ):
        by_hand = attention[:, :, queries, keys].mean(-1) > 0.5
        assert by_hand.any() and not by_hand.all()
        found = detect_head(embedded, repeated, kind, exclude_bos=kind == "induction_head")
        assert found[by_hand].min() > found[~by_hand].max(), kind


def test_only_the_heads_asked_for(embedded):
    every = detect_head(embedded, TEXT, "previous_token_head")
    for some in ([(0, 1), (2, 3), (2, 0)], {0: [1], 2: [3, 0]}):
        found = detect_head(embedded, TEXT, "previous_token_head", heads=some)
        asked = torch.zeros(4, 4, dtype=torch.bool)
        asked[[0, 2, 2], [1, 3, 0]] = True
        torch.testing.assert_close(found[asked], every[asked])
        assert (found[~asked] == -1).all()


def test_caches_are_used_and_left_as_they_are(embedded):
    every = detect_head(embedded, TEXT, "induction_head", exclude_bos=True)
    for options in (
        {},
        {"remove_batch_dim": True},
        {"names_filter": lambda name: name.endswith("pattern")},
    ):
        _, cache = embedded.run_with_cache(TEXT, **options)
        before = {name: value.clone() for name, value in cache.items()}
        assert torch.equal(
            detect_head(embedded, TEXT, "induction_head", cache=cache, exclude_bos=True), every
        )
        alone = ActivationCache(
            dict(cache), None, cache.has_batch_dim
        )  # which does not know its axes
        assert torch.equal(
            detect_head(embedded, TEXT, "induction_head", cache=alone, exclude_bos=True), every
        )
        assert all(torch.equal(cache[name], value) for name, value in before.items())
    _, other = embedded.run_with_cache("Mary and John")
    with pytest.raises(CannotBeDoneError, match="the cache belongs to another input"):
        detect_head(embedded, TEXT, "induction_head", cache=other)


def test_several_texts_are_averaged_with_all_arguments(embedded):
    texts, options = (
        [TEXT, "Mary and John went to the store"],
        {"heads": [(1, 0), (3, 2)], "exclude_bos": True},
    )
    each = [detect_head(embedded, text, "previous_token_head", **options) for text in texts]
    torch.testing.assert_close(
        detect_head(embedded, texts, "previous_token_head", **options), torch.stack(each).mean(0)
    )
    _, cache = embedded.run_with_cache(TEXT)
    with pytest.raises(CannotBeDoneError, match="a cache is of one text"):
        detect_head(embedded, texts, "previous_token_head", cache=cache)


def test_tokens_are_taken_as_they_are(embedded):
    texts = [TEXT, TEXT.replace("Mary", "Anna")]
    rows = embedded.to_tokens(texts)
    options = {"exclude_bos": True}
    for text, row in zip(texts, rows, strict=True):
        found = detect_head(embedded, row, "previous_token_head", **options)  # [pos], BOS included
        assert torch.equal(found, detect_head(embedded, text, "previous_token_head", **options))
    assert torch.equal(
        detect_head(embedded, rows, "previous_token_head", **options),
        detect_head(embedded, texts, "previous_token_head", **options),
    )
    with pytest.raises(CannotBeDoneError, match="two tokens or more"):
        detect_head(embedded, rows[0, :1], "previous_token_head")


def test_weights_in_a_pattern_are_warned_about(embedded, caplog):
    n = embedded.to_tokens(TEXT).shape[1]
    with caplog.at_level(logging.WARNING):
        detect_head(embedded, TEXT, torch.eye(n))
        assert not caplog.records
        detect_head(embedded, TEXT, torch.eye(n) * 0.5, error_measure="abs")
        assert not caplog.records
        found = detect_head(embedded, TEXT, torch.eye(n) * 0.5)
    assert len(caplog.records) == 1 and "other values than 0 and 1" in caplog.text
    torch.testing.assert_close(found, detect_head(embedded, TEXT, torch.eye(n)) / 2)


def test_errors(embedded):
    n = embedded.to_tokens(TEXT).shape[1]
    for kind in (ValueError, AssertionError):  # HookedTransformer's are assertions
        with pytest.raises(kind) as error:
            detect_head(embedded, TEXT, "name_mover_head")
        assert str(error.value) == INVALID_HEAD_NAME_ERR % "name_mover_head"
        for text in ("", " and" * 200):
            with pytest.raises(kind) as error:
                detect_head(embedded, text, "induction_head")
            assert str(error.value) == SEQ_LEN_ERR
        for wrong in (torch.ones(n, n), torch.zeros(n + 1, n + 1), torch.zeros(n, n - 1)):
            with pytest.raises(kind) as error:
                detect_head(embedded, TEXT, wrong)
            assert str(error.value) == DET_PAT_NOT_SQUARE_ERR % (n, wrong.shape)
    with pytest.raises(CannotBeDoneError, match="error_measure is 'sum'"):
        detect_head(embedded, TEXT, "induction_head", error_measure="sum")
    with pytest.raises(CannotBeDoneError, match="no head 4 in layer 0"):
        detect_head(embedded, TEXT, "induction_head", heads=[(0, 4)])
    with pytest.raises(CannotBeDoneError, match="no heads were given"):
        detect_head(embedded, TEXT, "induction_head", heads=[])
    with pytest.raises(CannotBeDoneError, match="there are no texts"):
        detect_head(embedded, [], "induction_head")
    same = {"exclude_bos": False, "exclude_current_token": False}
    with pytest.raises(CannotBeDoneError, match="must be square"):
        compute_head_attention_similarity_score(
            torch.ones(2, 3), torch.ones(2, 3), **same, error_measure="mul"
        )
    with pytest.raises(CannotBeDoneError, match=r"is \[3, 3\], the detection pattern \[2, 2\]"):
        compute_head_attention_similarity_score(
            torch.ones(3, 3), torch.ones(2, 2), **same, error_measure="mul"
        )
    with pytest.raises(CannotBeDoneError, match="attends to later tokens"):
        compute_head_attention_similarity_score(
            torch.ones(3, 3), torch.eye(3), **same, error_measure="abs"
        )
    with pytest.raises(CannotBeDoneError, match="error_measure is 'sum'"):
        compute_head_attention_similarity_score(
            torch.ones(3, 3), torch.eye(3), **same, error_measure="sum"
        )


def test_a_text_as_long_as_the_context_fits(embedded):
    n_ctx = embedded.cfg.n_ctx
    words = " and" * (n_ctx - 1)
    assert embedded.to_tokens(words, truncate=False).shape[1] == n_ctx
    assert detect_head(embedded, words, "previous_token_head").isfinite().all()


def test_legacy_names_are_these():
    from bridge.legacy import head_detector

    assert head_detector.detect_head is detect_head
    assert all(
        hasattr(head_detector, name)
        for name in ("HEAD_NAMES", "get_supported_heads", "SEQ_LEN_ERR")
    )


def test_two_tokens_are_enough(embedded):
    """And the previous token's pattern is then the first column alone, but for the first query."""
    seen = patterns(embedded, "Mary")
    assert seen.shape[-2:] == (2, 2)
    found = detect_head(embedded, "Mary", "previous_token_head", error_measure="mul")
    torch.testing.assert_close(found, seen[..., 1, 0] / seen.sum((-1, -2)))
