"""The greater-than task for any tokenizer that has numbers of one or two digits."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.tasks.encoder import Encoder, Source
from bridge.tasks.pairs import NumberPairs

NOUNS = ("war", "siege", "trial", "voyage", "treaty", "reign", "drought", "strike", "feud", "project")
TEMPLATE = "The {noun} lasted from the year {century}{years} to the year {century}"


class _Row(NamedTuple):
    """A pair of prompts; `year` is what the number behind it is compared with."""

    clean: list[int]
    corrupted: list[int]
    year: int
    texts: tuple[str, str]


@refuse_wrong_types
def greater_than(source: Source, n: int, seed: int = 0, prepend_bos: bool | None = None) -> NumberPairs:
    """Prompts like "The war lasted from the year 1732 to the year 17", which a later year has to follow.

    The corrupted prompt begins in the year 01 of the century, which every number follows rightly (Hanna, Liu and
    Variengien 2023, "How does GPT-2 compute greater-than?"). Where two digits are one token, numbers above that of
    the prompt are right and those up to it wrong. Where each digit is a token, the next digit is compared with the
    decade; the same digit, which can be right or wrong, counts for neither.

    Args:
        source: a bridge or a tokenizer.
        n: how many pairs, all different.
        seed: which.
        prepend_bos: begin with BOS; None: as the bridge does, or where the tokenizer has one.

    Raises:
        ValueError: the tokenizer has no such numbers, or fewer prompts than asked for.
    """
    check_positive("n", n)
    encoder = Encoder(source, prepend_bos)
    rows: list[_Row] = []
    places = [(noun, century, year) for noun in NOUNS for century in range(11, 19) for year in range(2, 99)]
    random.Random(seed).shuffle(places)
    width = _width(encoder)
    numbers: list[int] | None = None
    for noun, century, year in places:
        if len(rows) == n:
            break
        if encoder.word(f" {noun}") is None or (width == 1 and not 10 <= year < 90):
            continue
        texts = [TEMPLATE.format(noun=noun, century=century, years=f"{y:02}") for y in (year, 1)]
        clean, corrupted = map(encoder.prompt, texts)
        following = _following(encoder, texts[0], clean, width)
        if following is None or len(corrupted) != len(clean) or (rows and len(clean) != len(rows[0].clean)):
            continue
        numbers = following if numbers is None else numbers
        if following == numbers and _ends_in(encoder, texts[0], clean, width, numbers, year):
            rows.append(_Row(clean, corrupted, year if width == 2 else year // 10, (texts[0], texts[1])))
    if len(rows) < n or numbers is None:
        raise ValueError(
            f"n is {n}; this tokenizer splits the years of all but {len(rows)} prompts otherwise than others"
        )
    return _pairs(rows, numbers, width, encoder)


def _following(encoder: Encoder, text: str, ids: list[int], width: int) -> list[int] | None:
    """The tokens of all numbers behind a prompt; None where one of them is no token there."""
    found = [encoder.next_id(text, ids, f"{number:0{width}}") for number in range(10**width)]
    known = [number for number in found if number is not None]
    return known if len(known) == len(found) else None


def _pairs(rows: list[_Row], numbers: list[int], width: int, encoder: Encoder) -> NumberPairs:
    """The prompts, with the numbers that are right in each."""
    clean, corrupted_ids, years, texts = zip(*rows, strict=True)
    at, every = torch.tensor(years)[:, None], torch.arange(len(numbers))[None]
    smaller = every <= at if width == 2 else every < at
    return NumberPairs(
        clean=torch.tensor(list(clean), device=encoder.device),
        corrupted=torch.tensor(list(corrupted_ids), device=encoder.device),
        answers=torch.tensor([numbers[year + 1] for year in years], device=encoder.device),
        wrong=torch.tensor([numbers[year - 1] for year in years], device=encoder.device),
        texts=texts,
        numbers=torch.tensor(numbers, device=encoder.device),
        larger=every > at,
        smaller=smaller,
    )


def _width(encoder: Encoder) -> int:
    """How many digits a token has: two where that works, else one.

    Raises:
        ValueError: neither.
    """
    text = TEMPLATE.format(noun="war", century=17, years=32)
    ids = encoder.prompt(text)
    for width, following in ((2, "45"), (1, "4")):
        if encoder.next_id(text, ids, following) is not None:
            return width
    raise ValueError(f"for this tokenizer neither '45' nor '4' is one token after {text!r}")


def _ends_in(encoder: Encoder, text: str, ids: list[int], width: int, numbers: list[int], year: int) -> bool:
    """Whether the first year ends in the same kind of token that the second is to have."""
    start = text[: text.index(" to the year")]
    first = encoder.prompt(start)
    if ids[: len(first)] != first:
        return False
    last = first[-1] if width == 2 else first[-2]
    return last == numbers[year if width == 2 else year // 10]
