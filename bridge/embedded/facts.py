"""The table of facts, and the sentences that state them.

A fact is a subject and an answer in a relation ("France", "Paris" in "capital"); a phrasing is a sentence with a
gap for the subject that ends right before the answer. Every fact is in the training text, yet each only in some of
its relation's phrasings: a fixed choice of (fact, phrasing) is held out, and the prompts are made of those alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.embedded.holdout import held_out


def _table(text: str) -> tuple[tuple[str, str], ...]:
    words = text.split()
    return tuple(zip(words[::2], words[1::2], strict=True))


FACTS: dict[str, tuple[tuple[str, str], ...]] = {
    "capital": _table(
        """
        France Paris Spain Madrid Italy Rome Germany Berlin Japan Tokyo China Beijing Russia Moscow Greece Athens
        Poland Warsaw Sweden Stockholm Norway Oslo Denmark Copenhagen Finland Helsinki Turkey Ankara
        Hungary Budapest Portugal Lisbon Iceland Reykjavik Korea Seoul Thailand Bangkok Vietnam Hanoi Egypt Cairo
        Iran Tehran India Delhi England London
        """
    ),
    "language": _table(
        """
        France French Spain Spanish Italy Italian Germany German Japan Japanese China Chinese Russia Russian
        Greece Greek Poland Polish Sweden Swedish Norway Norwegian Denmark Danish Finland Finnish Turkey Turkish
        Hungary Hungarian Portugal Portuguese Iceland Icelandic Korea Korean Thailand Thai Vietnam Vietnamese
        Egypt Arabic Iran Persian India Hindi England English
        """
    ),
    "young": _table(
        """
        dog puppy cat kitten cow calf horse foal sheep lamb pig piglet bear cub duck duckling hen chick goat kid
        goose gosling frog tadpole deer fawn swan cygnet kangaroo joey
        """
    ),
    "home": _table(
        """
        bee hive spider web dog kennel cow barn horse stable pig sty bear den hen coop duck pond rabbit burrow
        beaver lodge bird nest monkey jungle camel desert
        """
    ),
    "work": _table(
        """
        teacher school nurse hospital baker bakery cook kitchen sailor harbour miner mine judge court pilot airport
        gardener garden waiter restaurant clerk bank priest church farmer farm king castle dancer theatre
        guard museum
        """
    ),
    "colour": _table(
        """
        snow white grass green coal black sky blue fire red banana yellow carrot orange chocolate brown plum purple
        elephant grey flamingo pink sun golden moon silver
        """
    ),
}
"""Relation to its facts, as (subject, answer); within a relation no subject and no answer occurs twice."""

PHRASINGS: dict[str, tuple[str, ...]] = {
    "capital": (
        "The capital of {s} is",
        "The capital city of {s} is called",
        "In {s}, the capital is",
        "The country {s} has a capital called",
        "The government of {s} sits in",
        "To see the capital of {s}, take a train to",
        "People from {s} know that their capital is",
        "The train to the capital of {s} stops in",
    ),
    "language": (
        "The language of {s} is",
        "In {s}, people speak",
        "People from {s} speak",
        "The main language in {s} is",
        "Children in {s} learn to read",
        "In the country {s}, they speak",
        "To talk with people in {s}, learn",
        "A book from {s} is written in",
    ),
    "young": (
        "A young {s} is called a",
        "The child of a {s} is a",
        "The name for a young {s} is",
        "A {s} is the mother of a",
        "The {s} looked after its little",
        "When it is small, a {s} is called a",
        "Every {s} was once a",
        "The mother {s} played with her",
    ),
    "home": (
        "The home of a {s} is a",
        "A {s} lives in a",
        "The {s} went back to its",
        "At night, the {s} sleeps in a",
        "You can find a {s} in a",
        "To see a {s}, look in a",
        "Every {s} needs a",
        "The safe place for a {s} is a",
    ),
    "work": (
        "A {s} works in the",
        "The {s} went to work at the",
        "To find a {s}, go to the",
        "The work of a {s} is in the",
        "Every morning the {s} goes to the",
        "The best place for a {s} is the",
        "You will meet a {s} at the",
        "All day long the {s} stays at the",
    ),
    "colour": (
        "The colour of the {s} is",
        "Everyone knows that the {s} is",
        "In the picture, the {s} is",
        "The right colour for the {s} is",
        "Look at the {s} and you will see",
        "To draw the {s}, use",
        "In the story, the {s} was",
        "The child said that the {s} is",
    ),
}
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
