"""Repeated random lists for any tokenizer."""

from __future__ import annotations

import random

from bridge.hooks.arguments import refuse_wrong_types
from bridge.tasks.encoder import Encoder, Source
from bridge.tasks.pairs import Pairs, Row, paired


@refuse_wrong_types
def induction(source: Source, n: int, length: int = 10, seed: int = 0, prepend_bos: bool | None = None) -> Pairs:
    """Random words, and the first of them again: what followed them the first time follows them now.

    In the corrupted prompt another word stands there the first time, and is the answer (Olsson et al. 2022, "In-context
    Learning and Induction Heads"). The words are tokens that begin with a space and are letters.

    Args:
        source: a bridge or a tokenizer.
        n: how many pairs.
        length: how many words the list has.
        seed: which.
        prepend_bos: begin with BOS; None: as the bridge does, or where the tokenizer has one.

    Raises:
        ValueError: the list is shorter than two words, or the tokenizer has too few words.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.tasks import induction
        >>> induction(TransformerBridge.boot_embedded(), 3, length=6).clean.shape
        torch.Size([3, 10])
    """
    if length < 2 or n < 1:
        raise ValueError(f"n is {n} and length is {length}; there must be 1 pair or more, of 2 words or more")
    encoder, rng = Encoder(source, prepend_bos), random.Random(seed)
    words = _words(encoder, rng, max(200, 4 * length))
    if len(words) < 2 * length:
        raise ValueError(f"only {len(words)} words of this tokenizer are one token; {2 * length} are needed")
    shown = max(1, length // 2)
    rows: list[Row] = []
    while len(rows) < n:
        chosen = rng.sample(words, length + 1)
        drawn, other = chosen[:-1], chosen[-1]
        text, changed = (
            "".join([*first, *drawn[:shown]]) for first in (drawn, [*drawn[:shown], other, *drawn[shown + 1 :]])
        )
        ids, corrupted = encoder.prompt(text), encoder.prompt(changed)
        if len(ids) != len(corrupted) or len(ids) - encoder.bos != length + shown:
            continue  # two of its words join
        answer, wrong = encoder.word(drawn[shown]), encoder.word(other)
        assert answer is not None and wrong is not None
        rows.append((ids, corrupted, answer, wrong, (text, changed)))
    return paired(rows, encoder.device)


def _words(encoder: Encoder, rng: random.Random, most: int) -> list[str]:
    """Words of one token each, with the space before them, in random order."""
    vocabulary = sorted(set(encoder.tokenizer.get_vocab().values()) - set(encoder.tokenizer.all_special_ids))
    rng.shuffle(vocabulary)
    found: list[str] = []
    for token in vocabulary:
        text = encoder.text(token).strip()
        word = f" {text}"
        if len(text) > 2 and text.isalpha() and encoder.word(word) == token:
            found.append(word)
            if len(found) == most:
                break
    return found
