"""The shipped model's three kinds of prompts, as pairs."""

from __future__ import annotations

import re
from collections import defaultdict

from bridge.bridge import TransformerBridge
from bridge.embedded import Prompt, prompts
from bridge.embedded.facts import FACTS
from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.tasks.encoder import Encoder
from bridge.tasks.pairs import Pairs, Row, paired

#: How many prompts are drawn at once.
_DRAWN = 200


@refuse_wrong_types
def embedded_pairs(bridge: TransformerBridge, kind: str, n: int, seed: int = 0) -> Pairs:
    """Pairs of the shipped model's prompts (see `bridge.embedded.prompts`), all of one length.

    - ``"ioi"``: in the corrupted prompt the other one gives, and is the wrong token.
    - ``"fact"``: another subject of the same relation is asked about; its answer is the wrong token.
    - ``"repeats"``: another word stood in the list where the answer does; it is the wrong token.

    Args:
        bridge: the shipped model, or another with its tokenizer.
        kind: see above.
        n: how many.
        seed: which.

    Raises:
        ValueError: an unknown kind, or more pairs than there are of one length.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.tasks import embedded_pairs
        >>> pairs = embedded_pairs(TransformerBridge.boot_embedded(), "ioi", 4, seed=1)
        >>> len({*pairs.clean.flatten().tolist()}) > 4
        True
    """
    check_positive("n", n)
    encoder = Encoder(bridge)
    by_length: dict[int, list[Row]] = defaultdict(list)
    drawn = 0
    while True:
        several = prompts(kind, drawn + _DRAWN, seed)[drawn:]
        for number, prompt in enumerate(several):
            other, wrong = _corrupted(prompt, several[number - 1])
            ids, corrupted = encoder.prompt(prompt.text), encoder.prompt(other)
            answer, wrong_id = encoder.word(prompt.answer), encoder.word(wrong)
            if len(ids) != len(corrupted) or answer is None or wrong_id is None:
                raise ValueError(f"this tokenizer is not the shipped model's: it splits {prompt.text!r} otherwise")
            rows = by_length[len(ids)]
            rows.append((ids, corrupted, answer, wrong_id, (prompt.text, other)))
            if len(rows) == n:
                return paired(rows, encoder.device)
        drawn += _DRAWN


def _corrupted(prompt: Prompt, another: Prompt) -> tuple[str, str]:
    """The corrupted text, and its answer."""
    answer = prompt.answer.strip()
    if prompt.kind == "ioi":
        assert prompt.wrong is not None
        before, after = prompt.text.rsplit(prompt.wrong.strip(), 1)
        return f"{before}{answer}{after}", prompt.wrong
    if prompt.kind == "repeats":
        used = set(prompt.text.split())
        other = next(word for word in another.text.split() if word not in used)
        return prompt.text.replace(f" {answer}", f" {other}", 1), f" {other}"
    assert prompt.wrong is not None
    wrong = prompt.wrong.strip()
    for facts in FACTS.values():
        subjects = {right: subject for subject, right in facts}
        if answer not in subjects or wrong not in subjects:
            continue
        for one, two in ((subjects[answer], subjects[wrong]), (subjects[answer].title(), subjects[wrong].title())):
            text, found = re.subn(rf"\b{one}\b", two, prompt.text)
            if found == 1:
                return text, prompt.wrong
    raise ValueError(f"the subject of {prompt.text!r} was not found")
