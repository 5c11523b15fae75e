"""Sentences and lists that are drawn at random, for prompts and for the training text."""

from __future__ import annotations

import random

from bridge.embedded import words
from bridge.embedded.holdout import list_held_out
from bridge.embedded.vocabulary import LIST_WORDS


def context(rng: random.Random, name: str | None = None) -> str:
    """Draw a sentence that may stand before others.

    Args:
        rng: where the chance comes from.
        name: someone the sentence may be about; without one it mentions no name.

    Example:
        >>> import random
        >>> from bridge.embedded.grammar import context
        >>> context(random.Random(0)).endswith(".")
        True
    """
    if name is None or rng.random() < 0.4:
        return rng.choice(words.CONTEXTS)
    return rng.choice(words.NAMED_CONTEXTS).format(c=name, q=rng.choice(words.PLACES), r=rng.choice(words.OBJECTS))


def random_list(rng: random.Random, length: int, held: bool) -> list[str]:
    """Draw a list of different words that is held out from training, or one that is not.

    Args:
        rng: where the chance comes from.
        length: how many words.
        held: whether the list has to be a held-out one.

    Raises:
        ValueError: `length` is under 1 or more than there are words.

    Example:
        >>> import random
        >>> from bridge.embedded.grammar import random_list
        >>> len(random_list(random.Random(0), 5, held=True))
        5
    """
    if not 1 <= length <= len(LIST_WORDS):
        raise ValueError(f"length is {length}; a list has 1 to {len(LIST_WORDS)} words")
    while True:
        drawn = rng.sample(LIST_WORDS, length)
        if list_held_out(drawn) == held:
            return drawn
