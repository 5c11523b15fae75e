"""Indirect object identification for any tokenizer."""

from __future__ import annotations

import random
from collections import Counter

from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.tasks.encoder import Encoder, Source
from bridge.tasks.pairs import Pairs, Row, paired

NAMES = (
    "Mary", "John", "Tom", "James", "Anna", "Paul", "Sarah", "David", "Kate", "Mark", "Alice", "Peter", "Emma", "Jack",
    "Laura", "Simon", "Lisa", "Martin", "Julia", "Robert", "Susan", "Michael", "Amy", "Daniel", "Rachel", "Andrew",
    "Jane", "Kevin", "Maria", "Richard",
)  # fmt: skip
PLACES = ("store", "garden", "restaurant", "school", "hospital", "office", "house", "station", "park", "museum")
OBJECTS = ("drink", "book", "ring", "kiss", "bone", "basketball", "computer", "necklace", "snack", "letter")
#: `a` and `b` are introduced, `s` is one of them, and what follows is the other. No name begins a text: there it would
#: be another token.
TEMPLATES = (
    "When {a} and {b} went to the {p}, {s} gave a {o} to",
    "Then, {a} and {b} went to the {p}. {s} gave a {o} to",
    "After {a} and {b} had lunch at the {p}, {s} gave a {o} to",
    "While {a} and {b} were working at the {p}, {s} gave a {o} to",
    "Then, {a} and {b} had a long argument at the {p}, and {s} gave a {o} to",
)


@refuse_wrong_types
def ioi(source: Source, n: int, seed: int = 0, corruption: str = "swap", prepend_bos: bool | None = None) -> Pairs:
    """Prompts like "When Mary and John went to the store, John gave a drink to", whose answer is " Mary".

    Both orders of the names occur (Wang et al. 2022, "Interpretability in the Wild"). Names, places and things are
    words that are one token each; all prompts have the same number of tokens, so they are of the templates that share
    one.

    Args:
        source: a bridge or a tokenizer.
        n: how many pairs, all different.
        seed: which.
        corruption: ``"swap"``: the second sentence names the other one, and the answer is the other name;
            ``"other"``: a third name, and neither is the answer.
        prepend_bos: begin with BOS; None: as the bridge does, or where the tokenizer has one.

    Raises:
        ValueError: an unknown corruption, fewer single-token words than needed, or more pairs than there are.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.tasks import ioi
        >>> pairs = ioi(TransformerBridge.boot_embedded(), 8)
        >>> pairs.clean.shape == pairs.corrupted.shape, len(pairs)
        (True, 8)
    """
    check_choice("corruption", corruption, ("swap", "other"))
    check_positive("n", n)
    encoder = Encoder(source, prepend_bos)
    names = encoder.words("names", NAMES, 3)
    places, things = encoder.words("places", PLACES, 1), encoder.words("objects", OBJECTS, 1)
    templates = _of_one_length(encoder, names, places, things)
    most = len(templates) * len(places) * len(things) * len(names) * (len(names) - 1) * 2
    if n > most // 2:  # all of them would take long to meet by chance
        raise ValueError(f"n is {n}; with this tokenizer ask for {most // 2} at most")
    rng = random.Random(seed)
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < n:
        template = rng.choice(templates)
        a, b, third = rng.sample(names, 3)
        giver, receiver = (a, b) if rng.random() < 0.5 else (b, a)
        filled = {"a": a, "b": b, "p": rng.choice(places), "o": rng.choice(things)}
        text = template.format(s=giver, **filled)
        if text in seen:
            continue
        seen.add(text)
        other = template.format(s=receiver if corruption == "swap" else third, **filled)
        ids = encoder.prompt(text)
        answer = encoder.next_id(text, ids, f" {receiver}")
        wrong = encoder.next_id(text, ids, f" {giver}")
        if answer is None or wrong is None:
            raise ValueError(f"{receiver!r} and {giver!r} are no single tokens after {text!r}")
        rows.append((ids, encoder.prompt(other), answer, wrong, (text, other)))
    return paired(rows, encoder.device)


def _of_one_length(encoder: Encoder, names: list[str], places: list[str], things: list[str]) -> list[str]:
    """The templates of which most have the same number of tokens."""
    words = {"a": names[0], "b": names[1], "s": names[0], "p": places[0], "o": things[0]}
    lengths = [len(encoder.prompt(template.format(**words))) for template in TEMPLATES]
    length, _ = Counter(lengths).most_common(1)[0]
    return [template for template, found in zip(TEMPLATES, lengths, strict=True) if found == length]
