"""Prompts for the shipped model with a known next token; none is in its training text.

Held out are: for "ioi" the pair of names, which no English training text combines; for "fact" the
sentence (the fact itself is trained, in other phrasings); for "repeats" the list.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bridge.embedded import language as words
from bridge.embedded.language import FACTS, clozes, context, pair_held_out, random_list

KINDS: tuple[str, ...] = ("ioi", "fact", "repeats")
"""The kinds of prompts there are."""

SHORTEST_LIST, LONGEST_LIST = 5, 20
"""How many words the lists of "repeats" prompts have."""


@dataclass(frozen=True)
class Prompt:
    """A text and its correct next token.

    `answer` and `wrong` are written exactly as they follow `text`, with the space before the word.
    Each is one token of the shipped tokenizer.

    Attributes:
        text: the prompt.
        answer: the right next token.
        wrong: a likely mistake: for "ioi" the name of the giver, for "fact" the answer to another
            fact of the same relation, for "repeats" None.
        kind: which kind of prompt it is: "ioi", "fact" or "repeats".

    Example:
        >>> from bridge.embedded import Prompt
        >>> Prompt("When Mary and John left, John waved to", " Mary", " John", "ioi").answer
        ' Mary'
    """

    text: str
    answer: str
    wrong: str | None
    kind: str


def prompts(kind: str, n: int, seed: int = 0) -> list[Prompt]:
    """Return `n` different prompts of one kind.

    A longer list with the same seed begins with the same prompts. Prompts of one IOI template
    without a sentence before it have the same number of tokens; otherwise lengths differ.

    Args:
        kind: "ioi" (indirect object identification: "When Mary and John went to the store, John
            gave a drink to"; both orders of the names occur), "fact" ("The capital of France is")
            or "repeats" (a random list of 5 to 20 different words, followed by its repetition,
            which stops after the first word or later; it starts with a space, so that the words are
            the same tokens both times).
        n: how many prompts.
        seed: the random seed; the same seed gives the same prompts.

    Raises:
        ValueError: `kind` is unknown, or `n` is not an integer from 0 to the number of prompts.

    Example:
        >>> from bridge.embedded import prompts
        >>> prompt = prompts("ioi", 10, seed=1)[0]
        >>> prompt.answer in prompt.text and prompt.wrong in f" {prompt.text}"
        True
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it can be one of {', '.join(map(repr, KINDS))}")
    if type(n) is not int or n < 0:
        raise ValueError(f"n is {n!r}; it has to be a whole number, 0 or more")
    if kind != "repeats" and n > (most := count(kind)):
        raise ValueError(
            f"n is {n}; there are {most} different {kind!r} prompts, so ask for {most} at most"
        )
    rng = random.Random(seed)
    make = {"ioi": _ioi, "fact": _fact, "repeats": _repeats}[kind]
    return list(itertools.islice(make(rng), n))


def held_out_pairs() -> list[tuple[str, str]]:
    """Return the pairs of names that no English training text brings together, in a fixed order.

    Example:
        >>> from bridge.embedded.prompts import held_out_pairs
        >>> len(held_out_pairs()[0])
        2
    """
    return [pair for pair in itertools.combinations(words.NAMES, 2) if pair_held_out(*pair)]


def count(kind: str) -> int:
    """Return how many different prompts of a kind there are.

    Args:
        kind: "ioi" (preceding sentences do not count as a difference) or "fact".

    Raises:
        ValueError: another kind; "repeats" has no limit.

    Example:
        >>> from bridge.embedded.prompts import count
        >>> count("fact") > 1000
        True
    """
    if kind == "ioi":
        n_orders, n_givers = 2, 2
        n_people = len(held_out_pairs()) * n_orders * n_givers
        return n_people * len(words.IOI_TEMPLATES) * len(words.PLACES) * len(words.OBJECTS)
    if kind == "fact":
        return sum(cloze.held_out for cloze in clozes()) * (1 + len(words.CONTEXTS))
    raise ValueError(f"kind is {kind!r}; only 'ioi' and 'fact' prompts can be counted")


def _without_repeats(rng: random.Random, size: int) -> Iterator[int]:
    """Yield the numbers below `size` in random order, excluding fixed points (a lazy
    shuffle).
    """
    moved: dict[int, int] = {}
    for i in range(size):
        j = rng.randrange(i, size)
        drawn = moved.get(j, j)
        moved[j] = moved.get(i, i)
        yield drawn


def _ioi(rng: random.Random) -> Iterator[Prompt]:
    pairs = held_out_pairs()
    for index in _without_repeats(rng, count("ioi")):
        index, pair = divmod(index, len(pairs))
        index, swapped = divmod(index, 2)
        index, first_gives = divmod(index, 2)
        index, template = divmod(index, len(words.IOI_TEMPLATES))
        thing, place = divmod(index, len(words.PLACES))
        first, second = reversed(pairs[pair]) if swapped else pairs[pair]
        giver, receiver = (first, second) if first_gives else (second, first)
        text = words.IOI_TEMPLATES[template].format(
            a=first, b=second, s=giver, p=words.PLACES[place], o=words.OBJECTS[thing]
        )
        if rng.random() < 0.4:
            third = rng.choice([name for name in words.NAMES if name not in (first, second)])
            text = f"{context(rng, third)} {text}"
        yield Prompt(text, f" {receiver}", f" {giver}", "ioi")


def _fact(rng: random.Random) -> Iterator[Prompt]:
    held = [cloze for cloze in clozes() if cloze.held_out]
    befores = ("", *(f"{sentence} " for sentence in words.CONTEXTS))
    for index in _without_repeats(rng, count("fact")):
        before, which = divmod(index, len(held))
        cloze = held[which]
        others = [answer for _, answer in FACTS[cloze.relation] if answer != cloze.answer]
        text = befores[before] + cloze.text
        yield Prompt(text, f" {cloze.answer}", f" {rng.choice(others)}", "fact")


def _repeats(rng: random.Random) -> Iterator[Prompt]:
    texts: set[str] = set()
    while True:
        length = rng.randint(SHORTEST_LIST, LONGEST_LIST)
        drawn = random_list(rng, length, held=True)
        # Show at least one repeated word: before it, nothing indicates that a repeat begins.
        shown = rng.randint(1, length - 1)
        text = "".join(f" {word}" for word in [*drawn, *drawn[:shown]])
        if text not in texts:
            texts.add(text)
            yield Prompt(text, f" {drawn[shown]}", None, "repeats")
