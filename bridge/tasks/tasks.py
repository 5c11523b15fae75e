"""Pairs of prompts of which one leads to another answer."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bridge.bridge import TransformerBridge
from bridge.circuits.graph import Metric, logit_difference
from bridge.embedded import Prompt, prompts
from bridge.embedded.language import FACTS
from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.run.inputs import input_device
from bridge.run.tokenization import TokenizerFacts

#: Clean ids, corrupted ids, the answer, the wrong token, and both texts.
Row = tuple[list[int], list[int], int, int, tuple[str, str]]


@dataclass(frozen=True)
class Pairs:
    """Prompts and their corrupted counterparts, all of one length.

    Attributes:
        clean, corrupted: token ids, ``[batch, pos]``.
        answers: the right next token of each clean prompt, ``[batch]``.
        wrong: the token that it is compared with, ``[batch]``.
        texts: the clean and the corrupted text of each.
    """

    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    answers: Int[Tensor, " batch"]
    wrong: Int[Tensor, " batch"]
    texts: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.answers)

    def metric(self, each: bool = False) -> Metric:
        """The logit of the answer less that of the wrong token at the last position, mean over the prompts.

        Args:
            each: a number for each prompt in place of their mean.
        """
        return logit_difference(self.answers, self.wrong, each=each)


@dataclass(frozen=True)
class NumberPairs(Pairs):
    """Prompts that more than one number can follow.

    Attributes:
        numbers: the tokens of all numbers that are compared, ``[number]``.
        larger, smaller: for each prompt, which of them are right and which are wrong, ``[batch, number]``.
    """

    numbers: Int[Tensor, " number"]
    larger: Bool[Tensor, "batch number"]
    smaller: Bool[Tensor, "batch number"]

    def metric(self, each: bool = False) -> Metric:
        """The probability of the right numbers less that of the wrong ones, mean over prompts (Hanna et al. 2023).

        Args:
            each: a number for each prompt in place of their mean.
        """
        sign = self.larger.float() - self.smaller.float()

        def metric(logits: Tensor) -> Tensor:
            probabilities = logits[:, -1].softmax(-1)[:, self.numbers.to(logits.device)]
            found = (probabilities * sign.to(probabilities)).sum(-1)
            return found if each else found.mean()

        return metric


def paired(rows: Sequence[Row], device: torch.device) -> Pairs:
    """Pairs from token lists.

    Args:
        rows: for each pair the clean ids, the corrupted ids, the answer, the wrong token and both texts.
        device: where to put them.
    """
    *numbers, texts = zip(*rows, strict=True)
    clean, corrupted, answers, wrong = (torch.tensor(each, device=device) for each in numbers)
    return Pairs(clean, corrupted, answers, wrong, texts)


# ----------------------------------------------------------------------------------------------------------------------
# Texts as token ids, with the checks that tasks need.
# ----------------------------------------------------------------------------------------------------------------------


#: What gives a tokenizer.
Source = TransformerBridge | PreTrainedTokenizerBase


class Encoder:
    """A tokenizer, asked for whole prompts and for single words.

    Args:
        source: a bridge, whose way to begin a text is taken, or a tokenizer.
        prepend_bos: whether prompts begin with BOS; None: as the bridge does, or where the tokenizer has one.

    Raises:
        ValueError: the bridge has no tokenizer, or the tokenizer no BOS that was asked for.
    """

    def __init__(self, source: Source, prepend_bos: bool | None = None) -> None:
        self.device = torch.device("cpu")
        if isinstance(source, TransformerBridge):
            if source.tokenizer is None:
                raise ValueError("the bridge has no tokenizer, and a task is made of texts: give it one")
            if prepend_bos is None:
                prepend_bos = source.cfg.default_prepend_bos
            self.device = input_device(source.original_model)
            source = source.tokenizer
        self.tokenizer = source
        self.facts = TokenizerFacts(source)
        self.bos = self.facts.bos is not None if prepend_bos is None else prepend_bos and self.facts.bos is not None
        self._words: dict[str, int | None] = {}

    def prompt(self, text: str) -> list[int]:
        """The ids of a prompt."""
        return self.facts.encode(text, self.bos, keep_ending=False)

    def word(self, text: str) -> int | None:
        """The id of a text that is one known token, else None."""
        if text not in self._words:
            ids = self.facts.encode(text, False, keep_ending=False)
            unknown = getattr(self.tokenizer, "unk_token_id", None)
            single = len(ids) == 1 and ids[0] != unknown and self.text(ids[0]).strip() == text.strip()
            self._words[text] = ids[0] if single else None
        return self._words[text]

    def words(self, what: str, candidates: Sequence[str], least: int) -> list[str]:
        """Those of some words that are one known token, with a space in front of them.

        Raises:
            ValueError: there are fewer than `least`.
        """
        known = [word for word in candidates if self.word(f" {word}") is not None]
        if len(known) < least:
            raise ValueError(f"only {len(known)} of the {what} are one token for this tokenizer; {least} are needed")
        return known

    def text(self, token: int) -> str:
        """The text of one token."""
        return str(self.tokenizer.decode([token]))

    def next_id(self, prompt: str, ids: list[int], following: str) -> int | None:
        """The one token that a text adds to a prompt, None where it is more than one or changes the prompt's own."""
        longer = self.prompt(prompt + following)
        known = longer[-1] != getattr(self.tokenizer, "unk_token_id", None)
        return longer[-1] if longer[:-1] == ids and known else None


# ----------------------------------------------------------------------------------------------------------------------
# The shipped model's three kinds of prompts, as pairs.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Repeated random lists for any tokenizer.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Indirect object identification for any tokenizer.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# The greater-than task for any tokenizer that has numbers of one or two digits.
# ----------------------------------------------------------------------------------------------------------------------


NOUNS = ("war", "siege", "trial", "voyage", "treaty", "reign", "drought", "strike", "feud", "project")
TEMPLATE = "The {noun} lasted from the year {century}{years} to the year {century}"


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
    rows: list[Row] = []
    years: list[int] = []  # what the number behind each prompt is compared with
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
        if following is None or len(corrupted) != len(clean) or (rows and len(clean) != len(rows[0][0])):
            continue
        numbers = following if numbers is None else numbers
        if following == numbers and _ends_in(encoder, texts[0], clean, width, numbers, year):
            years.append(at := year if width == 2 else year // 10)
            rows.append((clean, corrupted, numbers[at + 1], numbers[at - 1], (texts[0], texts[1])))
    if len(rows) < n or numbers is None:
        raise ValueError(
            f"n is {n}; this tokenizer splits the years of all but {len(rows)} prompts otherwise than others"
        )
    compared, every = torch.tensor(years)[:, None], torch.arange(len(numbers))[None]
    return NumberPairs(
        **vars(paired(rows, encoder.device)),
        numbers=torch.tensor(numbers, device=encoder.device),
        larger=every > compared,
        smaller=every <= compared if width == 2 else every < compared,
    )


def _following(encoder: Encoder, text: str, ids: list[int], width: int) -> list[int] | None:
    """The tokens of all numbers behind a prompt; None where one of them is no token there."""
    found = [encoder.next_id(text, ids, f"{number:0{width}}") for number in range(10**width)]
    known = [number for number in found if number is not None]
    return known if len(known) == len(found) else None


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
