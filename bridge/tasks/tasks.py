"""Prompt pairs whose two prompts lead to different answers."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bridge.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import Metric, logit_difference
from bridge.embedded import Prompt, prompts
from bridge.embedded.language import FACTS
from bridge.run.inputs import input_device
from bridge.run.tokenization import TokenizerFacts

#: Clean ids, corrupted ids, the answer, the wrong token, and both texts.
Row = tuple[list[int], list[int], int, int, tuple[str, str]]


@dataclass(frozen=True, repr=False)
class Pairs:
    """Prompts and their corrupted counterparts, all of the same length.

    Attributes:
        clean, corrupted: token ids, ``[batch, pos]``.
        answers: the correct next token of each clean prompt, ``[batch]``.
        wrong: the wrong token for comparison, ``[batch]``.
        texts: the clean and the corrupted text of each.
    """

    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    answers: Int[Tensor, " batch"]
    wrong: Int[Tensor, " batch"]
    texts: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        first = f", such as {_cut(self.texts[0][0])!r}" if self.texts else ""
        return f"{type(self).__name__}({len(self)} pairs of {self.clean.shape[1]} tokens{first})"

    def __len__(self) -> int:
        return len(self.answers)

    def metric(self, each: bool = False) -> Metric:
        """Return a metric: the answer's logit minus the wrong token's at the last position,
        averaged over prompts.

        Args:
            each: return one number per prompt instead of their mean.
        """
        return logit_difference(self.answers, self.wrong, each=each)


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@dataclass(frozen=True, repr=False)
class NumberPairs(Pairs):
    """Prompts with more than one correct number as continuation.

    Attributes:
        numbers: the tokens of all compared numbers, ``[number]``.
        larger, smaller: masks of the right and of the wrong numbers of each prompt,
            ``[batch, number]``.
    """

    numbers: Int[Tensor, " number"]
    larger: Bool[Tensor, "batch number"]
    smaller: Bool[Tensor, "batch number"]

    def metric(self, each: bool = False) -> Metric:
        """Return a metric: the probability of correct numbers minus that of wrong ones, averaged
        over prompts (Hanna et al. 2023).

        Args:
            each: return one number per prompt instead of their mean.
        """
        sign = self.larger.float() - self.smaller.float()

        def metric(logits: Tensor) -> Tensor:
            probabilities = logits[:, -1].softmax(-1)[:, self.numbers.to(logits.device)]
            differences = (probabilities * sign.to(probabilities)).sum(-1)
            return differences if each else differences.mean()

        return metric


def paired(rows: Sequence[Row], device: torch.device) -> Pairs:
    """Return pairs built from token lists.

    Args:
        rows: for each pair the clean ids, the corrupted ids, the answer, the wrong token and both
            texts.
        device: the device of the tensors.
    """
    *numbers, texts = zip(*rows, strict=True)
    clean, corrupted, answers, wrong = (torch.tensor(each, device=device) for each in numbers)
    return Pairs(clean, corrupted, answers, wrong, texts)


# --------------------------------------------------------------------------------------------------
# Texts as token ids, with the checks that tasks need.
# --------------------------------------------------------------------------------------------------


#: Objects that have a tokenizer.
Source = TransformerBridge | PreTrainedTokenizerBase


class Encoder:
    """A tokenizer wrapper that encodes complete prompts and single words.

    Args:
        source: a bridge, or a tokenizer. A bridge also decides how prompts begin.
        prepend_bos: whether prompts begin with BOS; None: as in the bridge, or if the tokenizer has
            one.

    Raises:
        ValueError: the bridge has no tokenizer, or the tokenizer lacks a requested BOS.
    """

    def __init__(self, source: Source, prepend_bos: bool | None = None) -> None:
        self.device = torch.device("cpu")
        if isinstance(source, TransformerBridge):
            if source.tokenizer is None:
                raise ValueError(
                    "the bridge has no tokenizer, and a task is made of texts: give it one"
                )
            if prepend_bos is None:
                prepend_bos = source.cfg.default_prepend_bos
            self.device = input_device(source.original_model)
            source = source.tokenizer
        self.tokenizer = source
        self.facts = TokenizerFacts(source)
        self.bos = prepend_bos is not False and self.facts.bos is not None
        self._words: dict[str, int | None] = {}

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return self.facts.encode(text, self.bos, keep_ending=False)

    def word(self, text: str) -> int | None:
        """Return the id of a text that is one known token, else None."""
        if text not in self._words:
            ids = self.facts.encode(text, False, keep_ending=False)
            single = len(ids) == 1 and self._is_known(ids[0])
            same = single and self.text(ids[0]).strip() == text.strip()
            self._words[text] = ids[0] if same else None
        return self._words[text]

    def words(self, what: str, candidates: Sequence[str], least: int) -> list[str]:
        """Return the words that are one known token with a leading space.

        Raises:
            ValueError: there are fewer than `least`.
        """
        known = [word for word in candidates if self.word(f" {word}") is not None]
        if len(known) < least:
            raise ValueError(
                f"only {len(known)} of the {what} are one token for this tokenizer; {least} are"
                " needed"
            )
        return known

    def text(self, token: int) -> str:
        """Return the text of one token."""
        return str(self.tokenizer.decode([token]))

    def next_id(self, prompt: str, ids: list[int], following: str) -> int | None:
        """Return the single token that a text adds to a prompt; None if it adds several or changes
        the prompt's tokens.
        """
        *start, last = self.prompt(prompt + following)
        return last if start == ids and self._is_known(last) else None

    def _is_known(self, token: int) -> bool:
        return token != getattr(self.tokenizer, "unk_token_id", None)


# --------------------------------------------------------------------------------------------------
# The shipped model's three kinds of prompts, as pairs.
# --------------------------------------------------------------------------------------------------


#: The number of prompts drawn at once.
_DRAWN = 200


@refuse_wrong_types
def embedded_pairs(bridge: TransformerBridge, kind: str, n: int, seed: int = 0) -> Pairs:
    """Return pairs of the shipped model's prompts (see `bridge.embedded.prompts`), all of the same
    length.

    - ``"ioi"``: in the corrupted prompt the other person gives, and the wrong token is the answer.
    - ``"fact"``: the corrupted prompt has another subject of the same relation, whose answer is the
      wrong token.
    - ``"repeats"``: the corrupted list has another word in place of the answer: the wrong token.

    Args:
        bridge: the shipped model, or another with its tokenizer.
        kind: see above.
        n: the number of pairs.
        seed: the random seed.

    Raises:
        ValueError: an unknown kind, or more pairs than exist with one length.

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
            row = _pair(encoder, prompt, several[number - 1])
            rows = by_length[len(row[0])]
            rows.append(row)
            if len(rows) == n:
                return paired(rows, encoder.device)
        drawn += _DRAWN


def _pair(encoder: Encoder, prompt: Prompt, another: Prompt) -> Row:
    """Return a prompt with its corrupted counterpart.

    Raises:
        ValueError: the tokenizer is not the shipped model's.
    """
    other, wrong = _corrupted(prompt, another)
    ids = encoder.prompt(prompt.text)
    corrupted = encoder.prompt(other)
    answer = encoder.word(prompt.answer)
    wrong_id = encoder.word(wrong)
    if len(ids) != len(corrupted) or answer is None or wrong_id is None:
        raise ValueError(
            f"this tokenizer is not the shipped model's: it splits {prompt.text!r} otherwise"
        )
    return ids, corrupted, answer, wrong_id, (prompt.text, other)


def _corrupted(prompt: Prompt, another: Prompt) -> tuple[str, str]:
    """Return the corrupted text and its answer."""
    answer = prompt.answer.strip()
    if prompt.kind == "repeats":
        used = set(prompt.text.split())
        other = next(word for word in another.text.split() if word not in used)
        return prompt.text.replace(f" {answer}", f" {other}", 1), f" {other}"
    assert prompt.wrong is not None
    wrong = prompt.wrong.strip()
    if prompt.kind == "ioi":
        before, after = prompt.text.rsplit(wrong, 1)
        return f"{before}{answer}{after}", prompt.wrong
    for facts in FACTS.values():
        subjects = {right: subject for subject, right in facts}
        if answer not in subjects or wrong not in subjects:
            continue
        subject, other = subjects[answer], subjects[wrong]
        matches = list(re.finditer(rf"\b{subject}\b", prompt.text, re.IGNORECASE))
        if matches:
            # The sentence before the fact may name the subject, too: "The sun was warm. The sun".
            last = matches[-1]
            word = other.title() if last[0] == subject.title() else other
            return f"{prompt.text[: last.start()]}{word}{prompt.text[last.end() :]}", prompt.wrong
    raise ValueError(f"the subject of {prompt.text!r} was not found")


# --------------------------------------------------------------------------------------------------
# Repeated random lists for any tokenizer.
# --------------------------------------------------------------------------------------------------


@refuse_wrong_types
def induction(
    source: Source, n: int, length: int = 10, seed: int = 0, prepend_bos: bool | None = None
) -> Pairs:
    """Return prompts of random words that start to repeat, so that the next word is known.

    The corrupted prompt has another word where the answer first occurs, and that word is its answer
    (Olsson et al. 2022, "In-context Learning and Induction Heads"). The words are tokens that
    consist of a space and letters.

    Args:
        source: a bridge or a tokenizer.
        n: the number of pairs.
        length: the number of words in the list.
        seed: the random seed.
        prepend_bos: begin with BOS; None: as in the bridge, or if the tokenizer has one.

    Raises:
        ValueError: the list is shorter than two words, or the tokenizer has too few words.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.tasks import induction
        >>> induction(TransformerBridge.boot_embedded(), 3, length=6).clean.shape
        torch.Size([3, 10])
    """
    if length < 2 or n < 1:
        raise ValueError(
            f"n is {n} and length is {length}; there must be 1 pair or more, of 2 words or more"
        )
    encoder = Encoder(source, prepend_bos)
    rng = random.Random(seed)
    words = _words(encoder, rng, max(200, 4 * length))
    if len(words) < 2 * length:
        raise ValueError(
            f"only {len(words)} words of this tokenizer are one token; {2 * length} are needed"
        )
    n_repeated = max(1, length // 2)
    rows: list[Row] = []
    while len(rows) < n:
        *drawn, other = rng.sample(words, length + 1)
        repeated = drawn[:n_repeated]
        text = "".join(drawn + repeated)
        changed = "".join([*repeated, other, *drawn[n_repeated + 1 :], *repeated])
        ids = encoder.prompt(text)
        corrupted = encoder.prompt(changed)
        if len(ids) != len(corrupted) or len(ids) - encoder.bos != length + n_repeated:
            continue  # two of its words merge into one token
        answer = encoder.word(drawn[n_repeated])
        wrong = encoder.word(other)
        assert answer is not None and wrong is not None
        rows.append((ids, corrupted, answer, wrong, (text, changed)))
    return paired(rows, encoder.device)


def _words(encoder: Encoder, rng: random.Random, most: int) -> list[str]:
    """Return words of one token each, with their leading space, in random order."""
    tokenizer = encoder.tokenizer
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    rng.shuffle(vocabulary)
    words: list[str] = []
    for token in vocabulary:
        text = encoder.text(token).strip()
        word = f" {text}"
        if len(text) > 2 and text.isalpha() and encoder.word(word) == token:
            words.append(word)
            if len(words) == most:
                break
    return words


# --------------------------------------------------------------------------------------------------
# Indirect object identification for any tokenizer.
# --------------------------------------------------------------------------------------------------


NAMES = (
    "Mary",
    "John",
    "Tom",
    "James",
    "Anna",
    "Paul",
    "Sarah",
    "David",
    "Kate",
    "Mark",
    "Alice",
    "Peter",
    "Emma",
    "Jack",
    "Laura",
    "Simon",
    "Lisa",
    "Martin",
    "Julia",
    "Robert",
    "Susan",
    "Michael",
    "Amy",
    "Daniel",
    "Rachel",
    "Andrew",
    "Jane",
    "Kevin",
    "Maria",
    "Richard",
)
PLACES = (
    "store",
    "garden",
    "restaurant",
    "school",
    "hospital",
    "office",
    "house",
    "station",
    "park",
    "museum",
)
OBJECTS = (
    "drink",
    "book",
    "ring",
    "kiss",
    "bone",
    "basketball",
    "computer",
    "necklace",
    "snack",
    "letter",
)
#: `a` and `b` are introduced, `s` is one of them, and the answer is the other. No text begins with
#: a name, which would be a different token there.
TEMPLATES = (
    "When {a} and {b} went to the {p}, {s} gave a {o} to",
    "Then, {a} and {b} went to the {p}. {s} gave a {o} to",
    "After {a} and {b} had lunch at the {p}, {s} gave a {o} to",
    "While {a} and {b} were working at the {p}, {s} gave a {o} to",
    "Then, {a} and {b} had a long argument at the {p}, and {s} gave a {o} to",
)


@refuse_wrong_types
def ioi(
    source: Source, n: int, seed: int = 0, corruption: str = "swap", prepend_bos: bool | None = None
) -> Pairs:
    """Return prompts like "When Mary and John went to the store, John gave a drink to", whose
    answer is " Mary".

    Both orders of the names occur (Wang et al. 2022, "Interpretability in the Wild"). Names, places
    and things are words of one token each. All prompts have the same number of tokens, so only
    templates of the same token count are used.

    Args:
        source: a bridge or a tokenizer.
        n: the number of pairs, all different.
        seed: the random seed.
        corruption: ``"swap"``: the second sentence names the other person, so the answer is the
            other name; ``"other"``: it names a third person, so neither name is the answer.
        prepend_bos: begin with BOS; None: as in the bridge, or if the tokenizer has one.

    Raises:
        ValueError: an unknown corruption, too few single-token words, or more pairs than exist.

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
    places = encoder.words("places", PLACES, 1)
    things = encoder.words("objects", OBJECTS, 1)
    templates = _of_one_length(encoder, names, places, things)
    n_pairs = len(templates) * len(places) * len(things) * len(names) * (len(names) - 1)
    if n > n_pairs:  # half of all: random draws would take long to reach the others
        raise ValueError(f"n is {n}; with this tokenizer ask for {n_pairs} at most")
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < n:
        template = rng.choice(templates)
        a, b, third = rng.sample(names, 3)
        giver, receiver = (a, b) if rng.random() < 0.5 else (b, a)
        words = {"a": a, "b": b, "p": rng.choice(places), "o": rng.choice(things)}
        text = template.format(s=giver, **words)
        if text in rows:
            continue
        other = template.format(s=receiver if corruption == "swap" else third, **words)
        rows[text] = _row(encoder, text, other, receiver, giver)
    return paired([*rows.values()], encoder.device)


def _row(encoder: Encoder, text: str, other: str, answer: str, wrong: str) -> Row:
    """Return a pair of texts whose answer and wrong word are single tokens.

    Raises:
        ValueError: they are not.
    """
    ids = encoder.prompt(text)
    answer_id = encoder.next_id(text, ids, f" {answer}")
    wrong_id = encoder.next_id(text, ids, f" {wrong}")
    if answer_id is None or wrong_id is None:
        raise ValueError(f"{answer!r} and {wrong!r} are no single tokens after {text!r}")
    return ids, encoder.prompt(other), answer_id, wrong_id, (text, other)


def _of_one_length(
    encoder: Encoder, names: list[str], places: list[str], things: list[str]
) -> list[str]:
    """Return the largest set of templates with the same number of tokens."""
    words = {"a": names[0], "b": names[1], "s": names[0], "p": places[0], "o": things[0]}
    lengths = [len(encoder.prompt(template.format(**words))) for template in TEMPLATES]
    length, _ = Counter(lengths).most_common(1)[0]
    return [template for template, n in zip(TEMPLATES, lengths, strict=True) if n == length]


# --------------------------------------------------------------------------------------------------
# The greater-than task for any tokenizer that has numbers of one or two digits.
# --------------------------------------------------------------------------------------------------


NOUNS = (
    "war",
    "siege",
    "trial",
    "voyage",
    "treaty",
    "reign",
    "drought",
    "strike",
    "feud",
    "project",
)
TEMPLATE = "The {noun} lasted from the year {century}{years} to the year {century}"


@refuse_wrong_types
def greater_than(
    source: Source, n: int, seed: int = 0, prepend_bos: bool | None = None
) -> NumberPairs:
    """Return prompts like "The war lasted from the year 1732 to the year 17", which a later year
    must follow.

    The corrupted prompt begins in the year 01 of the century, so any number is a correct
    continuation (Hanna, Liu and Variengien 2023, "How does GPT-2 compute greater-than?"). If two
    digits are one token, numbers above the prompt's are correct and all others wrong. If each digit
    is a token, the next digit is compared with the decade; an equal digit may be either, and is not
    counted.

    Args:
        source: a bridge or a tokenizer.
        n: the number of pairs, all different.
        seed: the random seed.
        prepend_bos: begin with BOS; None: as in the bridge, or if the tokenizer has one.

    Raises:
        ValueError: the tokenizer has no such numbers, or there are fewer prompts than requested.
    """
    check_positive("n", n)
    encoder = Encoder(source, prepend_bos)
    rows: list[Row] = []
    compared: list[int] = []  # the number that each prompt's continuation is compared with
    width = _width(encoder)
    numbers: list[int] | None = None
    for noun, year, text, other in _year_prompts(seed):
        if len(rows) == n:
            break
        if encoder.word(f" {noun}") is None or (width == 1 and not 10 <= year < 90):
            continue
        clean = encoder.prompt(text)
        corrupted = encoder.prompt(other)
        length = len(rows[0][0]) if rows else len(clean)
        following = _following(encoder, text, clean, width)
        if following is None or not len(corrupted) == len(clean) == length:
            continue
        numbers = numbers or following
        number = year if width == 2 else year // 10
        if following == numbers and _ends_in(encoder, text, clean, width, numbers[number]):
            compared.append(number)
            answer, wrong = numbers[number + 1], numbers[number - 1]
            rows.append((clean, corrupted, answer, wrong, (text, other)))
    if len(rows) < n or numbers is None:
        raise ValueError(
            f"n is {n}; this tokenizer splits the years of all but {len(rows)} prompts otherwise"
            " than others"
        )
    return _number_pairs(paired(rows, encoder.device), numbers, compared, width)


def _year_prompts(seed: int) -> Iterator[tuple[str, int, str, str]]:
    """Yield the noun, the year in its century, and both texts of each prompt, in random order."""
    places = list(itertools.product(NOUNS, range(11, 19), range(2, 99)))
    random.Random(seed).shuffle(places)
    for noun, century, year in places:
        text = TEMPLATE.format(noun=noun, century=century, years=f"{year:02}")
        yield noun, year, text, TEMPLATE.format(noun=noun, century=century, years="01")


def _number_pairs(
    pairs: Pairs, numbers: Sequence[int], compared: Sequence[int], width: int
) -> NumberPairs:
    """Return pairs with the numbers that are larger and smaller than that of each prompt."""
    own = torch.tensor(compared, device="cpu")[:, None]
    every = torch.arange(len(numbers), device="cpu")[None]
    return NumberPairs(
        **vars(pairs),
        numbers=torch.tensor(numbers, device=pairs.clean.device),
        larger=every > own,
        smaller=every <= own if width == 2 else every < own,
    )


def _following(encoder: Encoder, text: str, ids: list[int], width: int) -> list[int] | None:
    """Return the tokens of all numbers as continuations of a prompt; None if one of them is not a
    single token.
    """
    tokens: list[int] = []
    for number in range(10**width):
        token = encoder.next_id(text, ids, f"{number:0{width}}")
        if token is None:
            return None
        tokens.append(token)
    return tokens


def _width(encoder: Encoder) -> int:
    """Return the number of digits per token: two if the tokenizer supports it, else one.

    Raises:
        ValueError: neither works.
    """
    text = TEMPLATE.format(noun="war", century=17, years=32)
    ids = encoder.prompt(text)
    for width, following in ((2, "45"), (1, "4")):
        if encoder.next_id(text, ids, following) is not None:
            return width
    raise ValueError(f"for this tokenizer neither '45' nor '4' is one token after {text!r}")


def _ends_in(encoder: Encoder, text: str, ids: list[int], width: int, number: int) -> bool:
    """Tell whether the first year ends in the token of its number, as the second year has to."""
    start = text[: text.index(" to the year")]
    first = encoder.prompt(start)
    if ids[: len(first)] != first:
        return False
    return number == (first[-1] if width == 2 else first[-2])
