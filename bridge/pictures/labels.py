"""Tokens and other names as they stand in a picture."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Vocabulary(Protocol):
    """What can say a token's text: a `TransformerBridge` with a tokenizer."""

    def to_single_str_token(self, int_token: int) -> str:
        """The text of a token."""
        ...


class KnowsWords(Protocol):
    """What can say a word's token: a `TransformerBridge` with a tokenizer."""

    def to_single_token(self, string: str) -> int:
        """The token of a text."""
        ...


_SHOWN = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """A token's text with spaces and line ends that can be seen.

    A space is ``·``, a line feed ``↵``, a tab ``⇥``, the empty text ``∅``. Other characters without a shape, and these
    signs themselves, are shown by their number, so that no two texts look the same.

    Args:
        text: the token's text.

    Example:
        >>> from bridge.pictures.labels import visible
        >>> visible(" Mary"), visible("\\n\\n"), visible("")
        ('·Mary', '↵↵', '∅')
        >>> visible("\\x00"), visible("·")
        ('\\\\x00', '\\\\xb7')
    """
    return "".join(map(_shown, text)) or "∅"


def _shown(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    unseen = unicodedata.category(character)[0] in "CZ" or character in (*_SHOWN.values(), "∅", "\\")
    if not unseen:
        return character
    number = ord(character)
    if character == "\\":
        return "\\\\"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def token_labels(tokens: Sequence[str], n: int, what: str = "tokens") -> list[str]:
    """The labels of positions, one for each.

    Args:
        tokens: the text of each position.
        n: how many positions there are.
        what: the argument's name, for errors.

    Raises:
        TypeError: something else than a list of texts.
        ValueError: another number of them.

    Example:
        >>> from bridge.pictures.labels import token_labels
        >>> token_labels(["<bos>", " Mary"], 2)
        ['<bos>', '·Mary']
    """
    if isinstance(tokens, str | Tensor) or not all(isinstance(token, str) for token in tokens):
        raise TypeError(
            f"{what} is {type(tokens).__name__} {_short(tokens)}; give a list with the text of each position, such as "
            "bridge.to_str_tokens(prompt)"
        )
    if len(tokens) != n:
        raise ValueError(f"there are {len(tokens)} {what}, and {n} positions in the values: {_short(list(tokens))}")
    return [visible(token) for token in tokens]


def _short(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) < 80 else f"{text[:76]} ..."


def lookup(labels: Sequence[str], index: str) -> str:
    """A Vega expression: the label with a number.

    Args:
        labels: all labels.
        index: an expression for the number.

    Example:
        >>> from bridge.pictures.labels import lookup
        >>> lookup(["a", "·b"], "datum.value")
        '["a", "\\\\u00b7b"][datum.value]'
    """
    return f"{json.dumps(list(labels))}[{index}]"


def width_of(labels: Sequence[str]) -> int:
    """About how many pixels the longest label takes, at most 120.

    Args:
        labels: what is to be written, in the size of an axis.

    Example:
        >>> from bridge.pictures.labels import width_of
        >>> width_of(["abc"]) < width_of(["abcdef"])
        True
    """
    return min(120, 8 + 7 * max(map(wide, labels), default=0))


def wide(text: str) -> int:
    """How many letters' room a text takes.

    Args:
        text: the text.

    Example:
        >>> from bridge.pictures.labels import wide
        >>> wide("ab"), wide("日本")
        (2, 4)
    """
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
