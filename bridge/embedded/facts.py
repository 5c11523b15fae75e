"""The table of facts, and the sentences that state them.

A fact is a subject and an answer in a relation ("France", "Paris" in "capital"); a phrasing is a sentence with a
gap for the subject that ends right before the answer. Every fact is in the training text, yet each only in some of
its relation's phrasings: a fixed choice of (fact, phrasing) is held out, and the prompts are made of those alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.embedded.holdout import held_out
from bridge.embedded.words import LANGUAGE


def _pairs(words: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(words[::2], words[1::2], strict=True))


FACTS: dict[str, tuple[tuple[str, str], ...]] = {
    relation: _pairs(text.split()) for relation, text in LANGUAGE["facts"].items()
}
"""Relation to its facts, as (subject, answer); within a relation no subject and no answer occurs twice."""

PHRASINGS: dict[str, tuple[str, ...]] = {relation: tuple(given) for relation, given in LANGUAGE["phrasings"].items()}
"""Relation to its phrasings; `{s}` is the gap for the subject, and the answer is the next word."""

FACT_HOLDOUT = 4
"""One (fact, phrasing) in this many is held out from training."""


@dataclass(frozen=True)
class Cloze:
    """A fact in one phrasing: the sentence up to its answer.

    Example:
        >>> from bridge.embedded.facts import clozes
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
        >>> from bridge.embedded.facts import clozes
        >>> clozes()[0].answer
        'Paris'
    """
    return [
        Cloze(relation, phrasing.format(s=subject), answer, held_out(phrasing.format(s=subject), FACT_HOLDOUT))
        for relation, table in FACTS.items()
        for subject, answer in table
        for phrasing in PHRASINGS[relation]
    ]
