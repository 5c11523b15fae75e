"""The rule that keeps prompts apart from the training text: a stable hash of what is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

PAIR_HOLDOUT = 8
"""One unordered pair of names in this many is held out from training."""

LIST_HOLDOUT = 4
"""One list of words in this many is held out from training."""


def held_out(key: str, one_in: int) -> bool:
    """Say whether `key` is held out from training, the same on every machine and in every run.

    Args:
        key: what is held out or not, as text.
        one_in: about one key in this many is held out.

    Example:
        >>> from bridge.embedded.holdout import held_out
        >>> held_out("anything", 1)
        True
    """
    # Python's own hash changes from run to run, and a plain checksum is linear, so that it would hold out pairs by
    # a pattern across names.
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def pair_held_out(first: str, second: str) -> bool:
    """Say whether the two names, in either order, are a pair that no English training text brings together.

    Args:
        first: a name.
        second: another name.

    Example:
        >>> from bridge.embedded.holdout import pair_held_out
        >>> pair_held_out("Mary", "John") == pair_held_out("John", "Mary")
        True
    """
    return held_out("|".join(sorted((first, second))), PAIR_HOLDOUT)


def list_held_out(words: Iterable[str]) -> bool:
    """Say whether the list of words, in this order, is never repeated in the training text.

    Args:
        words: the list, once through.

    Example:
        >>> from bridge.embedded.holdout import list_held_out
        >>> list_held_out(["stone", "river"]) in (True, False)
        True
    """
    return held_out(" ".join(word.strip() for word in words), LIST_HOLDOUT)
