"""The generator of the training text of the shipped model. Pure Python."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bridge.embedded import language as words
from bridge.embedded.language import (
    SPECIALS,
    Cloze,
    clozes,
    context,
    list_held_out,
    pair_held_out,
    random_list,
    split,
    vocabulary,
)

ALL_PIECES: tuple[str, ...] = tuple(vocabulary()[len(SPECIALS) :])
"""Every piece that is not a special token."""
TRAINED_CLOZES: tuple[Cloze, ...] = tuple(cloze for cloze in clozes() if not cloze.held_out)
"""The facts in the phrasings that the training text has."""


@dataclass(frozen=True)
class Document:
    """One training text.

    Attributes:
        kind: "ioi", "facts", "story", "count", "list" or "pieces" (a list of any pieces, not
            English).
        pieces: the text, one piece per token.
        chance: how many pieces at the start are pure chance, which no reader could foretell.

    Example:
        >>> from tools.embedded.text import Document
        >>> Document("story", ("Mary", " smiled", ".")).text
        'Mary smiled.'
    """

    kind: str
    pieces: tuple[str, ...]
    chance: int = 0

    @property
    def text(self) -> str:
        """The text itself."""
        return "".join(self.pieces)


def pick_names(rng: random.Random, count: int) -> list[str]:
    """Draw different names no two of which are a held-out pair.

    Args:
        rng: where the chance comes from.
        count: how many names.

    Example:
        >>> import random
        >>> from tools.embedded.text import pick_names
        >>> len(pick_names(random.Random(0), 3))
        3
    """
    while True:
        names = rng.sample(words.NAMES, count)
        if not any(pair_held_out(x, y) for i, x in enumerate(names) for y in names[:i]):
            return names


def _ioi(rng: random.Random, long: bool) -> str:
    first, second, third, fourth = pick_names(rng, 4)
    # One document in twelve has a third person give, so that either of the two may receive.
    subject, other = (first, second) if rng.random() < 0.5 else (second, first)
    giver = third if rng.random() < 1 / 12 else subject
    template, place, thing = (
        rng.choice(words.IOI_TEMPLATES),
        rng.choice(words.PLACES),
        rng.choice(words.OBJECTS),
    )
    sentence = template.format(a=first, b=second, p=place, o=thing, s=giver) + f" {other}."
    ending = rng.choice(words.IOI_ENDINGS).format(i=other, s=giver)
    before = rng.randint(2, 8) if long else rng.choice((0, 0, 0, 1, 1, 2))
    return " ".join([*(context(rng, fourth) for _ in range(before)), sentence + ending])


def _facts(rng: random.Random, long: bool) -> str:
    count = rng.randint(4, 9) if long else rng.randint(1, 3)
    sentences = [f"{cloze.text} {cloze.answer}." for cloze in rng.sample(TRAINED_CLOZES, count)]
    if rng.random() < 0.5:
        sentences.insert(0, context(rng))
    return " ".join(sentences)


def _story(rng: random.Random, long: bool) -> str:
    names = pick_names(rng, 4)
    sentences = []
    for _ in range(rng.randint(2, 4) if long else 1):
        first, second = rng.sample(names, 2)
        thing, other = rng.sample(words.OBJECTS, 2)
        place, elsewhere = rng.sample(words.PLACES, 2)
        colour, another = rng.sample(words.COLOURS, 2)
        template = rng.choice(words.STORY_TEMPLATES)
        sentences.append(
            template.format(
                a=first, b=second, o=thing, r=other, p=place, q=elsewhere, k=colour, l=another
            )
        )
    return " ".join(sentences)


def _count(rng: random.Random, long: bool) -> str:
    step = rng.choice((1, 1, 1, 2))
    start = rng.randrange(len(words.NUMBERS) - 3 * step)
    numbers = words.NUMBERS[start::step][: None if long else rng.randint(3, 10)]
    if rng.random() < 0.4:
        numbers = numbers[::-1]
    return rng.choice(words.COUNT_TEMPLATES).format(a=rng.choice(words.NAMES), n=", ".join(numbers))


_ENGLISH = {"ioi": _ioi, "facts": _facts, "story": _story, "count": _count}
MAX_PIECES = 126
"""The longest training text, which with its beginning and end tokens fills the model's context."""
LONGEST_REPEAT = 120
"""The most pieces that the laps of a list have together."""


def english(rng: random.Random, long: bool = False) -> Document:
    """Draw one text of English sentences: people who give, facts, stories or counting.

    Args:
        rng: where the chance comes from.
        long: whether to draw one with many sentences, which otherwise are few.

    Example:
        >>> import random
        >>> from tools.embedded.text import english
        >>> english(random.Random(0)).kind in ("ioi", "facts", "story", "count")
        True
    """
    kind = rng.choices(tuple(_ENGLISH), weights=(42, 40, 12, 6))[0]
    while True:
        pieces = split(_ENGLISH[kind](rng, long))
        if len(pieces) <= MAX_PIECES:
            return Document(kind, pieces)


def repeated(rng: random.Random, long: bool = False) -> Document:
    """Draw a training text that is a list said again: of words, or one time in five of any pieces.

    Args:
        rng: where the chance comes from.
        long: whether to draw a list of 3 to 60 words said two or more times; otherwise it has 4 to
            16 and is said twice.

    Example:
        >>> import random
        >>> from tools.embedded.text import repeated
        >>> repeated(random.Random(0)).kind in ("list", "pieces")
        True
    """
    length = round(math.exp(rng.uniform(math.log(3), math.log(60)))) if long else rng.randint(4, 16)
    times = rng.randint(2, LONGEST_REPEAT // length) if long else 2
    if rng.random() < 0.2:
        while True:
            drawn = [rng.choice(ALL_PIECES) for _ in range(length)]
            if not list_held_out(drawn):
                return Document("pieces", tuple(drawn * times), chance=length)
    lead = split(rng.choice(words.LIST_LEADS))
    pieces = tuple(f" {word}" for word in random_list(rng, length, held=False))
    return Document("list", (*lead, *(pieces * times)), chance=len(lead) + length)


SORTS: dict[str, Callable[[random.Random], Document]] = {
    "short": english,
    "long": functools.partial(english, long=True),
    "lists": repeated,
    "long lists": functools.partial(repeated, long=True),
}
"""The streams of training text, and what draws a text of each."""


def documents(sort: str, seed: int = 0) -> Iterator[Document]:
    """Yield one of the streams of training text, which has no end.

    Args:
        sort: "short" or "long" (English), "lists" or "long lists" (repeated).
        seed: which text; the same seed yields the same text.

    Raises:
        ValueError: `sort` is none of these.

    Example:
        >>> from tools.embedded.text import documents
        >>> next(documents("short")) == next(documents("short"))
        True
    """
    if sort not in SORTS:
        raise ValueError(f"sort is {sort!r}; it can be one of {', '.join(map(repr, SORTS))}")
    # A text as seed is hashed by random itself, stably.
    rng = random.Random(f"{sort} {seed}")
    while True:
        yield SORTS[sort](rng)
