"""Tasks: prompts of one length whose answers are single tokens, with tokenizers of several
kinds.
"""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bridge import TransformerBridge
from bridge.tasks import embedded_pairs, greater_than, induction, ioi
from bridge.tasks import ioi as ioi_function
from bridge.tasks.tasks import NOUNS
from tests.conftest import tiny

PROSE = (
    "When",
    "and",
    "went",
    "to",
    "the",
    ",",
    "gave",
    "a",
    "drink",
    "Then",
    ".",
    "After",
    "had",
    "lunch",
    "at",
    "While",
    "were",
    "working",
    "long",
    "argument",
    "store",
    "garden",
    "book",
    "Mary",
    "John",
    "Tom",
    "The",
    "lasted",
    "from",
    "year",
    "war",
    "siege",
)


def tokenizer_of(digits, words=PROSE, bos=True):
    """A tokenizer with words (and the space before them) and numbers of so many digits as
    tokens.
    """
    numbers = [f"{i:0{digits}}" for i in range(10**digits)]
    tokens = [
        "<unk>",
        "<bos>",
        *words,
        *(f" {word}" for word in words),
        *numbers,
        *(f" {n}" for n in numbers),
    ]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    pattern = Regex(rf" ?\d{{1,{digits}}}| ?[^\s\d.,]+|[.,]")
    inner.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    special = {"bos_token": "<bos>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)


def check(pairs, n):
    assert len(pairs) == n == len({row for row, _ in pairs.texts})
    assert pairs.clean.shape == pairs.corrupted.shape and len(pairs.clean) == n
    assert (pairs.clean != pairs.corrupted).any(1).all() and (pairs.answers != pairs.wrong).all()


@pytest.mark.parametrize("kind", ["ioi", "fact", "repeats"])
def test_the_shipped_models_kinds(embedded, kind):
    pairs = embedded_pairs(embedded, kind, 12, seed=3)
    check(pairs, 12)
    with torch.no_grad():
        assert (embedded(pairs.clean)[:, -1].argmax(-1) == pairs.answers).all()
        assert (embedded(pairs.corrupted)[:, -1].argmax(-1) == pairs.wrong).float().mean() > 0.9
        assert (
            pairs.metric()(embedded(pairs.clean))
            > 5
            > -5
            > pairs.metric()(embedded(pairs.corrupted))
        )
    assert embedded.to_tokens(pairs.texts[0][0]).tolist() == pairs.clean[:1].tolist()
    again = embedded_pairs(embedded, kind, 12, seed=3)
    assert torch.equal(again.clean, pairs.clean) and again.texts == pairs.texts
    assert embedded_pairs(embedded, kind, 12, seed=4).texts != pairs.texts


def test_a_fact_is_corrupted_in_its_own_sentence(embedded):
    pairs = embedded_pairs(embedded, "fact", 300)  # "The sun was warm. Every morning the sun is"
    for text, other in pairs.texts:
        before = text.rpartition(". ")[0]
        assert before == other.rpartition(". ")[0]
    assert ((pairs.clean != pairs.corrupted).sum(dim=1) == 1).all()


@pytest.mark.parametrize("corruption", ["swap", "other"])
def test_ioi(embedded, corruption):
    pairs = ioi(embedded, 10, corruption=corruption)
    check(pairs, 10)
    for (text, other), answer, wrong in zip(pairs.texts, pairs.answers, pairs.wrong, strict=True):
        receiver, giver = (
            embedded.to_single_str_token(int(token)).strip() for token in (answer, wrong)
        )
        assert text.count(giver) == 2 and text.count(receiver) == 1
        assert other.count(giver) == 1 and other.count(receiver) == (
            2 if corruption == "swap" else 1
        )
    orders = {
        text.index(wrong.strip()) < text.index(answer.strip())
        for (text, _), answer, wrong in zip(
            pairs.texts,
            map(embedded.to_single_str_token, pairs.answers.tolist()),
            map(embedded.to_single_str_token, pairs.wrong.tolist()),
            strict=True,
        )
    }
    assert orders == {True, False}


def test_ioi_with_a_tokenizer_alone():
    pairs = ioi(tokenizer_of(2), 6)
    check(pairs, 6)
    assert (pairs.clean[:, 0] == 1).all()
    without = ioi(tokenizer_of(2), 6, prepend_bos=False)
    assert torch.equal(without.clean, pairs.clean[:, 1:])
    assert ioi(tokenizer_of(2, bos=False), 6).clean.shape == without.clean.shape


def test_ioi_takes_single_tokens_only():
    few = [word for word in PROSE if word != "Tom"]
    with pytest.raises(ValueError, match="only 2 of the names are one token"):
        ioi(tokenizer_of(2, few), 2)
    with pytest.raises(ValueError, match="ask for"):
        ioi(tokenizer_of(2), 10_000)


def test_greater_than_with_two_digits():
    tokenizer = tokenizer_of(2)
    pairs = greater_than(tokenizer, 9)
    check(pairs, 9)
    for row, (text, other) in enumerate(pairs.texts):
        year = int(text.split("year ")[1][2:4])
        assert other == text.replace(f"{year:02} to", "01 to")
        right = [int(tokenizer.decode([t])) for t in pairs.numbers[pairs.larger[row]].tolist()]
        wrong = [int(tokenizer.decode([t])) for t in pairs.numbers[pairs.smaller[row]].tolist()]
        assert right == list(range(year + 1, 100)) and wrong == list(range(year + 1))
    logits = torch.zeros(9, 3, len(tokenizer))
    logits[:, -1, pairs.numbers[99]] = 50
    assert pairs.metric()(logits).item() == pytest.approx(1.0)
    logits[:, -1, pairs.numbers[99]] = 0
    logits[:, -1, pairs.numbers[0]] = 50
    assert pairs.metric()(logits).item() == pytest.approx(-1.0)


def test_greater_than_with_single_digits():
    tokenizer = tokenizer_of(1)
    pairs = greater_than(tokenizer, 9)
    check(pairs, 9)
    for row, (text, _) in enumerate(pairs.texts):
        decade = int(text.split("year ")[1][2])
        right = [int(tokenizer.decode([t])) for t in pairs.numbers[pairs.larger[row]].tolist()]
        wrong = [int(tokenizer.decode([t])) for t in pairs.numbers[pairs.smaller[row]].tolist()]
        assert right == list(range(decade + 1, 10)) and wrong == list(range(decade))


def test_greater_than_refuses(embedded):
    with pytest.raises(ValueError, match="neither '45' nor '4' is one token"):
        greater_than(embedded, 3)
    with pytest.raises(ValueError, match="n is 2000"):
        greater_than(tokenizer_of(2), 2000)
    assert len(set(NOUNS)) == len(NOUNS)


def test_induction(embedded):
    pairs = induction(embedded, 8, length=8)
    check(pairs, 8)
    assert pairs.clean.shape == (8, 1 + 8 + 4)
    assert torch.equal(pairs.clean[:, 1:5], pairs.clean[:, 9:13])
    assert torch.equal(pairs.clean[:, 5], pairs.answers) and torch.equal(
        pairs.corrupted[:, 5], pairs.wrong
    )
    assert ((pairs.clean != pairs.corrupted).sum(1) == 1).all()
    with torch.no_grad():
        assert (embedded(pairs.clean)[:, -1].argmax(-1) == pairs.answers).float().mean() > 0.7
    with pytest.raises(ValueError, match="are needed"):
        induction(tokenizer_of(1, ["store", "garden", "drink"]), 2, length=4)


def test_refusals(embedded):
    with pytest.raises(ValueError, match="has no tokenizer"):
        ioi(TransformerBridge(tiny("gpt2")), 2)
    with pytest.raises(ValueError, match="corruption is 'noise'"):
        ioi(embedded, 2, corruption="noise")
    for function in (ioi_function, greater_than, induction):
        with pytest.raises(ValueError, match="n is 0"):
            function(embedded, 0)
    with pytest.raises(ValueError, match="kind is 'colour'"):
        embedded_pairs(embedded, "colour", 2)
