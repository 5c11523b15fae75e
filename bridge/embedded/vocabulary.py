"""The vocabulary of the shipped model: its pieces, one per token, in id order. Pure Python.

A text is cut into pieces: a word with the space before it (" Mary"), a word at the very beginning ("When"), or a
punctuation mark. Joining the pieces gives the text back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from bridge.embedded import words
from bridge.embedded.facts import FACTS, PHRASINGS

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
        >>> from bridge.embedded.vocabulary import split
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
        >>> from bridge.embedded.vocabulary import list_words
        >>> "river" in list_words(), "Mary" in list_words()
        (True, False)
    """
    groups = [words.LIST_EXTRAS, words.PLACES, words.OBJECTS, words.COLOURS, words.NUMBERS]
    fact_words = (word for table in FACTS.values() for fact in table for word in fact if word.islower())
    return tuple(dict.fromkeys([*(word for group in groups for word in group), *fact_words]))


def vocabulary() -> list[str]:
    """Return every piece of the language in id order, the special tokens first.

    Capitalised words come with and without a space before them, all others only with it.

    Example:
        >>> from bridge.embedded.vocabulary import vocabulary
        >>> pieces = vocabulary()
        >>> " Mary" in pieces, "Mary" in pieces, " river" in pieces, "river" in pieces
        (True, True, True, False)
    """
    templates: list[str] = [
        *words.CONTEXTS,
        *words.NAMED_CONTEXTS,
        *words.IOI_TEMPLATES,
        *words.IOI_ENDINGS,
        *words.STORY_TEMPLATES,
        *words.COUNT_TEMPLATES,
        *words.LIST_LEADS,
        *(phrasing for group in PHRASINGS.values() for phrasing in group),
    ]
    fact_words = (word for table in FACTS.values() for fact in table for word in fact)
    every = list(dict.fromkeys([*words.NAMES, *list_words(), *fact_words, *_template_words(templates)]))
    starts = [word for word in every if word[0].isupper()]
    return [*SPECIALS, *PUNCTUATION, *(f" {word}" for word in every), *starts]


LIST_WORDS: tuple[str, ...] = list_words()
"""What word lists are made of."""
