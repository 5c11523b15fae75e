"""The words of the shipped model's English: names, places, things, numbers, and what list words there are.

Everything is fixed and ordered: the order decides token ids, so adding a word means training again.
"""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _split(
    """
    Mary John Alice Bob Anna Tom Emma James Sarah David Lucy Peter Kate Paul Jane Mark Laura Luke Ruth Adam
    Helen George Julia Henry Linda Kevin Nancy Martin Olivia Oscar Rachel Robert Susan Simon Wendy Steven
    Diana Victor Fiona William Grace Daniel Maria Edward Nina Frank Sophie Jack Clara Michael
    """
)
"""Fifty given names, each one token."""

PLACES: tuple[str, ...] = _split(
    """
    store shop park school garden library market station office house beach restaurant hospital museum
    kitchen bakery castle farm bank church
    """
)
"""Places that read well after "went to the" and "at the"."""

OBJECTS: tuple[str, ...] = _split(
    """
    drink book ball letter ring map key cake hat flower lamp coin pen cup basket ticket camera guitar gift card
    """
)
"""Things that can be given; all take the article "a"."""

COLOURS: tuple[str, ...] = _split("red blue green yellow black white brown orange purple pink grey golden silver")
"""Colours, of the facts and of things in stories."""

NUMBERS: tuple[str, ...] = _split(
    """
    one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty
    """
)
"""Number words in order."""

LIST_EXTRAS: tuple[str, ...] = _split(
    """
    stone river cloud table chair window door bridge road hill valley forest lake island boat wheel hammer nail
    rope paper glass bottle spoon fork plate knife bread butter cheese honey salt pepper sugar milk water wine
    rain wind storm thunder summer winter spring autumn music song dance story poem dream smile shadow mirror
    clock candle feather leaf root seed
    """
)
"""Words that occur only in word lists."""

CONTEXTS: tuple[str, ...] = (
    "It was a cold day.",
    "The sun was warm.",
    "It was late in the evening.",
    "Here is something to remember.",
    "The teacher told us a story.",
    "We learned this at school.",
    "Nobody said a word.",
    "The old man opened his book.",
    "The children listened well.",
)
"""Sentences without names which may stand before another sentence."""

NAMED_CONTEXTS: tuple[str, ...] = (
    "{c} was in the {q}.",
    "{c} wanted a {r}.",
    "The {q} was far from the house of {c}.",
    "Nobody told {c} about the {r}.",
    "In the morning {c} had left the {q}.",
)
"""Sentences about someone else (`c`, a place `q`, a thing `r`) which may stand before another sentence."""

IOI_TEMPLATES: tuple[str, ...] = (
    "When {a} and {b} went to the {p}, {s} gave a {o} to",
    "After {a} and {b} came to the {p}, {s} handed a {o} to",
    "While {a} and {b} were at the {p}, {s} passed a {o} to",
    "Then {a} and {b} met at the {p}. Later, {s} sold a {o} to",
    "{a} and {b} walked to the {p}. There {s} showed a {o} to",
    "The friends {a} and {b} found a {o} at the {p}. Then {s} gave it to",
    "One day {a} and {b} had lunch near the {p}, and {s} brought a {o} to",
    "{a} sat with {b} in the {p}. After some time {s} offered a {o} to",
    "At the {p}, {a} saw {b} with a {o}, and {s} said hello to",
    "Because {a} and {b} liked the {p}, {s} sent a {o} from there to",
)
"""Indirect object identification: `s` is `a` or `b`, and what follows is the other one of the two."""

IOI_ENDINGS: tuple[str, ...] = (
    "",
    "",
    " Then {i} thanked {s}.",
    " Now {i} was happy.",
    " So {s} and {i} went home.",
)
"""What may follow the sentence: `i` received, `s` gave."""

STORY_TEMPLATES: tuple[str, ...] = (
    "{a} gave a {o} to {b}. Now {b} has the {o}.",
    "{a} got a {o} from {b}. Now {a} has the {o}.",
    "{b} gave {a} a {o}. Now {a} has the {o}, and {a} thanked {b}.",
    "{a} put the {o} in the {p}. Then {b} looked for the {o} and found it in the {p}.",
    "{a} has a {k} {o} and {b} has a {l} {r}. The {o} of {a} is {k}. The {r} of {b} is {l}.",
    "{a} has a {k} {o} and {b} has a {l} {r}. The {r} of {b} is {l}. The {o} of {a} is {k}.",
    "{a} is in the {p}. {b} is in the {q}. To see {a}, go to the {p}. To see {b}, go to the {q}.",
    "{a} is in the {p}. {b} is in the {q}. To see {b}, go to the {q}. To see {a}, go to the {p}.",
    "{a} wanted a {o} and {b} wanted a {r}. So {a} got the {o}, and {b} got the {r}.",
)
"""Short stories about two people `a`, `b`, things `o`, `r`, places `p`, `q` and colours `k`, `l`."""

COUNT_TEMPLATES: tuple[str, ...] = (
    "{a} counts: {n}.",
    "Now count: {n}.",
    "The children count: {n}.",
)
"""Counting, up or down, by one or by two: `n` is number words with commas between them."""

LIST_LEADS: tuple[str, ...] = ("", "", "Words:", "Now the list:")
"""What may stand before a repeated list of words."""
