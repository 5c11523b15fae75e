"""The prompts: what they promise, and that none of them is in the training text. Needs neither
torch nor the model.
"""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys

import pytest

from bridge.embedded import Prompt, prompts
from bridge.embedded.language import (
    FACTS,
    IOI_TEMPLATES,
    NAMES,
    PHRASINGS,
    clozes,
    list_held_out,
    pair_held_out,
    random_list,
    split,
    vocabulary,
)
from bridge.embedded.prompts import KINDS, count, held_out_pairs
from tools.embedded.text import SORTS, Document, documents


@pytest.fixture(scope="module")
def training_text() -> list[Document]:
    return [document for sort in SORTS for document in itertools.islice(documents(sort), 8000)]


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_prompts(kind: str) -> None:
    random.seed(1)
    first = prompts(kind, 50, seed=7)
    random.seed(2)
    assert prompts(kind, 50, seed=7) == first
    assert prompts(kind, 20, seed=7) == first[:20]
    assert prompts(kind, 50, seed=8) != first


@pytest.mark.unchecked  # beartype draws which item of a list it looks at
@pytest.mark.parametrize("kind", KINDS)
def test_global_random_state_is_left_alone(kind: str) -> None:
    state = random.getstate()
    prompts(kind, 5)
    assert random.getstate() == state


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_and_of_their_kind(kind: str) -> None:
    items = prompts(kind, 1000)
    assert len({item.text for item in items}) == 1000
    assert {item.kind for item in items} == {kind}
    assert prompts(kind, 0) == []


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_next_piece(kind: str) -> None:
    known = set(vocabulary())
    for item in prompts(kind, 500, seed=3):
        pieces = split(item.text)
        assert known.issuperset(pieces)
        for word in filter(None, (item.answer, item.wrong)):
            assert word in known
            assert split(item.text + word) == (*pieces, word)


def test_ioi_prompts_name_two_people_one_of_them_twice() -> None:
    orders = set()
    for item in prompts("ioi", 300):
        assert item.wrong is not None
        words = re.findall("[A-Za-z]+", item.text)
        answer, wrong = item.answer.strip(), item.wrong.strip()
        assert words.count(answer) == 1
        assert words.count(wrong) == 2
        assert pair_held_out(answer, wrong)
        orders.add(words.index(answer) < words.index(wrong))
    assert orders == {True, False}


def test_fact_prompts_have_a_plausible_wrong_answer() -> None:
    answers = {relation: {answer for _, answer in table} for relation, table in FACTS.items()}
    for item in prompts("fact", 300):
        assert item.wrong is not None and item.wrong != item.answer
        together = {item.answer.strip(), item.wrong.strip()}
        assert any(together <= group for group in answers.values())


def test_repeats_prompts_are_a_list_and_the_start_of_it() -> None:
    for item in prompts("repeats", 300):
        words = item.text.split()
        length = len(set(words))
        assert 5 <= length <= 20
        shown = len(words) - length
        assert shown >= 1
        assert words[length:] == words[:shown]
        assert item.answer == f" {words[shown]}"
        assert item.wrong is None


def test_all_fact_prompts_can_be_had() -> None:
    most = count("fact")
    assert len({item.text for item in prompts("fact", most)}) == most


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("kind", "n", "said"),
    [
        ("poem", 3, r"'poem'.*'ioi', 'fact', 'repeats'"),
        ("ioi", -1, "n is -1"),
        ("fact", True, "n is True"),
        ("repeats", 2.5, r"n is 2\.5"),
        ("fact", 10**9, rf"n is 1000000000.*{count('fact')} at most"),
        ("ioi", 10**9, rf"n is 1000000000.*{count('ioi')} at most"),
    ],
)
def test_wrong_arguments_are_named(kind: str, n: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prompts(kind, n)


def test_other_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="'repeats'"):
        count("repeats")
    with pytest.raises(ValueError, match="'poems'"):
        next(documents("poems"))
    with pytest.raises(ValueError, match="length is 0"):
        random_list(random.Random(0), 0, held=True)


def test_prompt_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Prompt("a", " b", None, "fact").text = "c"  # type: ignore[misc]


def test_every_name_is_in_held_out_and_in_trained_pairs() -> None:
    pairs = held_out_pairs()
    assert len(pairs) > 100
    for name in NAMES:
        held = sum(name in pair for pair in pairs)
        assert 1 <= held <= len(NAMES) // 2


def test_no_training_text_brings_a_held_out_pair_together(training_text: list[Document]) -> None:
    names = set(NAMES)
    for document in training_text:
        if document.kind in ("list", "pieces"):
            continue
        present = names & {piece.strip() for piece in document.pieces}
        assert not any(pair_held_out(*pair) for pair in itertools.combinations(present, 2)), (
            document.text
        )


def test_no_training_text_has_an_ioi_prompt(training_text: list[Document]) -> None:
    text = "\n".join(document.text for document in training_text)
    assert not any(item.text in text for item in prompts("ioi", 300))


def test_no_training_text_has_a_held_out_sentence(training_text: list[Document]) -> None:
    text = "\n".join(document.text for document in training_text if document.kind == "facts")
    held = [cloze for cloze in clozes() if cloze.held_out]
    assert not any(f"{cloze.text} {cloze.answer}" in text for cloze in held)
    assert all(f"{cloze.text} {cloze.answer}." in text for cloze in clozes() if not cloze.held_out)


def test_held_out_sentences_are_no_part_of_trained_ones() -> None:
    trained = "\n".join(f"{cloze.text} {cloze.answer}." for cloze in clozes() if not cloze.held_out)
    assert not any(cloze.text in trained for cloze in clozes() if cloze.held_out)


def test_every_fact_is_trained_in_some_phrasing_and_held_out_in_another() -> None:
    by_fact: dict[tuple[str, str], list[bool]] = {}
    for cloze in clozes():
        by_fact.setdefault((cloze.relation, cloze.answer), []).append(cloze.held_out)
    assert all(held.count(False) >= 3 for held in by_fact.values())
    assert sum(any(held) for held in by_fact.values()) > 0.8 * len(by_fact)
    for relation, table in FACTS.items():
        assert (
            len({subject for subject, _ in table})
            == len({answer for _, answer in table})
            == len(table)
        )
        assert len(set(PHRASINGS[relation])) == len(PHRASINGS[relation])


def test_no_training_text_repeats_a_held_out_list(training_text: list[Document]) -> None:
    lists = [document for document in training_text if document.kind == "list"]
    assert len(lists) > 5000
    for document in lists:
        once = dict.fromkeys(piece.strip() for piece in document.pieces[: document.chance])
        words = [word for word in once if word.islower() and word != "list" and word != "the"]
        assert not list_held_out(words), document.text
    said = "\n".join(document.text for document in lists)
    assert not any(item.text in said for item in prompts("repeats", 300))


def test_training_text_has_every_kind_and_no_unknown_piece(training_text: list[Document]) -> None:
    known = set(vocabulary())
    assert {document.kind for document in training_text} == {
        "ioi",
        "facts",
        "story",
        "count",
        "list",
        "pieces",
    }
    for document in training_text:
        assert known.issuperset(document.pieces)
        assert len(document.pieces) <= 126
        if document.kind != "pieces":
            assert split(document.text) == document.pieces


def test_every_template_is_trained(training_text: list[Document]) -> None:
    text = "\n".join(document.text for document in training_text if document.kind == "ioi")
    for template in IOI_TEMPLATES:
        assert re.search(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(template)), text), template


def test_training_text_is_the_same_in_every_process() -> None:
    code = (
        "from itertools import islice; from tools.embedded.text import SORTS, documents;"
        "print(hash(''), '|', [d.text for s in SORTS for d in islice(documents(s), 20)])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert len({run.stdout.split("|", 1)[1] for run in runs}) == 1


def test_import_is_light() -> None:
    code = (
        "import sys, bridge.embedded; print(sorted({'torch', 'transformers', 'tokenizers'} &"
        " set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
