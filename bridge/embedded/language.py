"""The vocabulary of the shipped model: its pieces, one per token, in id order. Pure Python.

A text is cut into pieces: a word with the space before it (" Mary"), a word at the very beginning
("When"), or a punctuation mark. Joining the pieces gives the text back.
"""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FACTS", "NAMES", "PHRASINGS"]

# --------------------------------------------------------------------------------------------------
# The words of the shipped model's English and the templates of its sentences, from `language.toml`.
#
# Everything is fixed and ordered: the order decides token ids, so adding a word means training
# again.
# --------------------------------------------------------------------------------------------------


LANGUAGE: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("language.toml").read_text(encoding="utf-8")
)
"""The whole file: words, sentences, facts, phrasings."""
_WORDS: dict[str, tuple[str, ...]] = {
    kind: tuple(text.split()) for kind, text in LANGUAGE["words"].items()
}
_SENTENCES: dict[str, tuple[str, ...]] = {
    kind: tuple(templates) for kind, templates in LANGUAGE["sentences"].items()
}

NAMES, PLACES, OBJECTS = _WORDS["names"], _WORDS["places"], _WORDS["objects"]
COLOURS, NUMBERS, LIST_EXTRAS = _WORDS["colours"], _WORDS["numbers"], _WORDS["list_extras"]
CONTEXTS, NAMED_CONTEXTS = _SENTENCES["contexts"], _SENTENCES["named_contexts"]
IOI_TEMPLATES, IOI_ENDINGS = _SENTENCES["ioi_templates"], _SENTENCES["ioi_endings"]
STORY_TEMPLATES, COUNT_TEMPLATES = _SENTENCES["story_templates"], _SENTENCES["count_templates"]
LIST_LEADS = _SENTENCES["list_leads"]


# --------------------------------------------------------------------------------------------------
# The rule that separates prompts from the training text: a stable hash of the held-out item.
# --------------------------------------------------------------------------------------------------


PAIR_HOLDOUT = 8
"""One unordered pair of names in this many is held out from training."""

LIST_HOLDOUT = 4
"""One list of words in this many is held out from training."""


def held_out(key: str, one_in: int) -> bool:
    """Tell whether `key` is held out from training; the answer is the same on every machine and in
    every run.

    Args:
        key: the item, as text.
        one_in: about one key in this many is held out.

    Example:
        >>> from bridge.embedded.language import held_out
        >>> held_out("anything", 1)
        True
    """
    # Python's own hash changes between runs. A plain checksum is linear, so it would hold out pairs
    # in a regular pattern across names.
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def pair_held_out(first: str, second: str) -> bool:
    """Tell whether no English training text combines the two names, in either order.

    Args:
        first: a name.
        second: another name.

    Example:
        >>> from bridge.embedded.language import pair_held_out
        >>> pair_held_out("Mary", "John") == pair_held_out("John", "Mary")
        True
    """
    return held_out("|".join(sorted((first, second))), PAIR_HOLDOUT)


def list_held_out(words: Iterable[str]) -> bool:
    """Tell whether the list of words, in this order, is never repeated in the training text.

    Args:
        words: the list, without its repetition.

    Example:
        >>> from bridge.embedded.language import list_held_out
        >>> list_held_out(["stone", "river"]) in (True, False)
        True
    """
    return held_out(" ".join(word.strip() for word in words), LIST_HOLDOUT)


# --------------------------------------------------------------------------------------------------
# The table of facts, and the sentences that state them.
#
# A fact is a subject and an answer in a relation ("France", "Paris" in "capital"); a phrasing is a
# sentence with a gap for the subject that ends right before the answer. Every fact is in the
# training text, yet each only in some of its relation's phrasings: a fixed choice of (fact,
# phrasing) is held out, and the prompts use only these.
# --------------------------------------------------------------------------------------------------


def _pairs(words: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(words[::2], words[1::2], strict=True))


FACTS: dict[str, tuple[tuple[str, str], ...]] = {
    relation: _pairs(text.split()) for relation, text in LANGUAGE["facts"].items()
}
"""Relation to its facts, as (subject, answer); within a relation no subject and no answer
occurs twice.
"""

PHRASINGS: dict[str, tuple[str, ...]] = {
    relation: tuple(phrasings) for relation, phrasings in LANGUAGE["phrasings"].items()
}
"""Relation to its phrasings; `{s}` is the gap for the subject, and the answer is the next word."""

FACT_HOLDOUT = 4
"""One (fact, phrasing) in this many is held out from training."""


@dataclass(frozen=True)
class Cloze:
    """A fact in one phrasing: the sentence up to its answer.

    Example:
        >>> from bridge.embedded.language import clozes
        >>> clozes()[0].text
        'The capital of France is'
    """

    relation: str
    text: str
    answer: str
    held_out: bool


def clozes() -> list[Cloze]:
    """Return every fact in every phrasing, marked held out or not, in a fixed order.

    Example:
        >>> from bridge.embedded.language import clozes
        >>> clozes()[0].answer
        'Paris'
    """
    table: list[Cloze] = []
    for relation, facts in FACTS.items():
        for subject, answer in facts:
            for phrasing in PHRASINGS[relation]:
                text = phrasing.format(s=subject)
                table.append(Cloze(relation, text, answer, held_out(text, FACT_HOLDOUT)))
    return table


PIECE = r" ?[A-Za-z]+|[^A-Za-z\s]|\s"
"""The pattern of one piece; the tokenizer cuts text by the same one."""

SPECIALS: tuple[str, ...] = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The special tokens, in id order from 0."""

PUNCTUATION: tuple[str, ...] = (".", ",", ":")
"""The punctuation of the text."""


def split(text: str) -> tuple[str, ...]:
    """Cut a text into its pieces.

    Args:
        text: any text.

    Example:
        >>> from bridge.embedded.language import split
        >>> split("When Mary left, John")
        ('When', ' Mary', ' left', ',', ' John')
    """
    return tuple(re.findall(PIECE, text))


def _template_words(templates: Iterable[str]) -> Iterator[str]:
    for template in templates:
        yield from re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", " ", template))


def list_words() -> tuple[str, ...]:
    """Return the words that word lists are made of: common nouns, colours and numbers, no names.

    Example:
        >>> from bridge.embedded.language import list_words
        >>> "river" in list_words(), "Mary" in list_words()
        (True, False)
    """
    words = [*LIST_EXTRAS, *PLACES, *OBJECTS, *COLOURS, *NUMBERS]
    words += [word for word in _fact_words() if word.islower()]
    return tuple(dict.fromkeys(words))


def _fact_words() -> list[str]:
    """Return the subjects and answers of all facts."""
    words: list[str] = []
    for table in FACTS.values():
        for fact in table:
            words += fact
    return words


def vocabulary() -> list[str]:
    """Return every piece of the language in id order, the special tokens first.

    Capitalised words occur with and without a leading space, all others only with it.

    Example:
        >>> from bridge.embedded.language import vocabulary
        >>> pieces = vocabulary()
        >>> " Mary" in pieces, "Mary" in pieces, " river" in pieces, "river" in pieces
        (True, True, True, False)
    """
    templates: list[str] = [
        *CONTEXTS,
        *NAMED_CONTEXTS,
        *IOI_TEMPLATES,
        *IOI_ENDINGS,
        *STORY_TEMPLATES,
        *COUNT_TEMPLATES,
        *LIST_LEADS,
        *(phrasing for group in PHRASINGS.values() for phrasing in group),
    ]
    words = [*NAMES, *list_words(), *_fact_words(), *_template_words(templates)]
    different = list(dict.fromkeys(words))
    starts = [word for word in different if word[0].isupper()]
    return [*SPECIALS, *PUNCTUATION, *(f" {word}" for word in different), *starts]


LIST_WORDS: tuple[str, ...] = list_words()
"""What word lists are made of."""


# --------------------------------------------------------------------------------------------------
# Random sentences and lists, for prompts and for the training text.
# --------------------------------------------------------------------------------------------------


def context(rng: random.Random, name: str | None = None) -> str:
    """Draw a sentence that may stand before others.

    Args:
        rng: the random generator.
        name: a name that the sentence may mention; without one it mentions no name.

    Example:
        >>> import random
        >>> from bridge.embedded.language import context
        >>> context(random.Random(0)).endswith(".")
        True
    """
    if name is None or rng.random() < 0.4:
        return rng.choice(CONTEXTS)
    return rng.choice(NAMED_CONTEXTS).format(c=name, q=rng.choice(PLACES), r=rng.choice(OBJECTS))


def random_list(rng: random.Random, length: int, held: bool) -> list[str]:
    """Draw a list of different words, either held out from training or not.

    Args:
        rng: the random generator.
        length: how many words.
        held: whether the list must be held out.

    Raises:
        ValueError: `length` is under 1 or more than there are words.

    Example:
        >>> import random
        >>> from bridge.embedded.language import random_list
        >>> len(random_list(random.Random(0), 5, held=True))
        5
    """
    if not 1 <= length <= len(LIST_WORDS):
        raise ValueError(f"length is {length}; a list has 1 to {len(LIST_WORDS)} words")
    while True:
        drawn = rng.sample(LIST_WORDS, length)
        if list_held_out(drawn) == held:
            return drawn
