"""Colours and configuration that all pictures share, in light and dark.

Every colour is an expression of one parameter of the picture, ``dark``: the same picture is drawn on light and on dark
ground, and a page that changes its ground changes that parameter and nothing else.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import torch
from torch import Tensor

FONT = "system-ui, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"

#: Colours by what they are for, on light and on dark ground.
PALETTE: dict[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#131416"),
    "ink": ("#1f2328", "#e4e6ea"),
    "faint": ("#c8ccd2", "#4a4e55"),
    "blank": ("#ececec", "#1f2125"),
    "line": ("#2166ac", "#74b6f0"),
    "accent": ("#b35806", "#ffb066"),
}

#: From strongly negative over zero to strongly positive: orange and blue, which all common kinds of colour vision tell
#: apart (ColorBrewer's PuOr and RdBu ends; Harrower and Brewer 2003), with the ground's own tone at zero.
DIVERGING: list[tuple[str, str]] = [
    ("#8f4507", "#ffb066"),
    ("#eba04a", "#b5651d"),
    ("#f7f7f7", "#1b1d21"),
    ("#6baed6", "#2f6ea8"),
    ("#08519c", "#8cc8ff"),
]
#: From nothing to all.
SEQUENTIAL: list[tuple[str, str]] = [
    ("#f7f9fc", "#1b1d21"),
    ("#9ecae1", "#2f6ea8"),
    ("#08519c", "#a9d7ff"),
]
#: Where black and white text can be read equally well, as a part of each scale, on light and on dark ground: there the
#: colour's luminance is 0.179, and either has a contrast of 4.58. Text changes its colour there.
READABLE: dict[str, tuple[float, float]] = {
    "sequential": (0.833, 0.555),
    "positive": (0.78, 0.564),
    "negative": (0.831, 0.48),
}


def dark_parameter() -> alt.Parameter:
    """The parameter that says which ground a picture stands on.

    Example:
        >>> from bridge.pictures.style import dark_parameter
        >>> dark_parameter().name
        'dark'
    """
    return alt.param(name="dark", value=False)


def themed(light: str, dark: str) -> alt.ExprRef:
    """A colour that depends on the ground.

    Args:
        light, dark: the colour on each.

    Example:
        >>> from bridge.pictures.style import themed
        >>> themed("#fff", "#000").to_dict()
        {'expr': "dark ? '#000' : '#fff'"}
    """
    return alt.ExprRef(f"dark ? '{dark}' : '{light}'")


def colour(name: str) -> alt.ExprRef:
    """A colour of the palette.

    Args:
        name: what it is for, one of `PALETTE`.

    Example:
        >>> from bridge.pictures.style import colour
        >>> colour("ground").to_dict()
        {'expr': "dark ? '#131416' : '#ffffff'"}
    """
    return themed(*PALETTE[name])


def diverging(limit: float) -> alt.Scale:
    """A scale centred at zero, as far to either side.

    Args:
        limit: the largest absolute value; 0 counts as 1.

    Example:
        >>> from bridge.pictures.style import diverging
        >>> diverging(4.0).to_dict()["domain"]
        [-4.0, -2.0, 0.0, 2.0, 4.0]
    """
    limit = limit or 1.0
    domain = [limit * part for part in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    return alt.Scale(domain=domain, range=[themed(*pair) for pair in DIVERGING], clamp=True, interpolate="lab")


def sequential(limit: float = 1.0) -> alt.Scale:
    """A scale from zero.

    Args:
        limit: the largest value; 0 counts as 1.

    Example:
        >>> from bridge.pictures.style import sequential
        >>> sequential(1.0).to_dict()["domain"]
        [0.0, 0.5, 1.0]
    """
    limit = limit or 1.0
    domain = [0.0, limit / 2, limit]
    return alt.Scale(domain=domain, range=[themed(*pair) for pair in SEQUENTIAL], clamp=True, interpolate="lab")


def ink_on(strength: str, signed: bool = False) -> dict[str, object]:
    """The colour of text on a coloured cell, so that it can be read: its contrast is 4.5 or more.

    Args:
        strength: a Vega expression for how far the cell's colour is along its scale, from 0 to 1, or from -1.
        signed: the scale is `diverging`, not `sequential`.

    Example:
        >>> from bridge.pictures.style import ink_on
        >>> ink_on("datum.v")["condition"]["test"]
        '(datum.v) > (dark ? 0.555 : 0.833)'
    """

    def beyond(part: str, side: str) -> str:
        light, dark = READABLE[side]
        return f"({part}) > (dark ? {dark} : {light})"

    test = f"{beyond(strength, 'positive')} || {beyond(f'-({strength})', 'negative')}"
    return {
        "condition": {
            "test": test if signed else beyond(strength, "sequential"),
            "value": themed("#ffffff", "#000000").to_dict(),
        },
        "value": themed("#000000", "#ffffff").to_dict(),
    }


def colour_bar(scale: alt.Scale, title: str) -> alt.Legend:
    """A legend with numbers at the same distance from each other.

    Args:
        scale: what it explains.
        title: what the numbers are.

    Example:
        >>> from bridge.pictures.style import colour_bar, diverging
        >>> colour_bar(diverging(3.0), "score").to_dict()["values"]
        [-3.0, -1.5, 0.0, 1.5, 3.0]
    """
    return alt.Legend(title=title, values=scale.to_dict()["domain"], format=".3~g", titleLimit=420)


def tooltips(shown: Mapping[str, str], format: str | None = None) -> list[alt.Tooltip]:
    """What hovering over a mark says.

    Args:
        shown: of each line the field that it shows, and its title.
        format: of the numbers; None: as they are.

    Example:
        >>> from bridge.pictures.style import tooltips
        >>> tooltips({"w:Q": "weight"})[0].to_dict()
        {'field': 'w', 'title': 'weight', 'type': 'quantitative'}
    """
    given: dict[str, Any] = {} if format is None else {"format": format}
    return [alt.Tooltip(field, title=title, **given) for field, title in shown.items()]


def configuration() -> alt.Config:
    """Fonts, lines and colours of axes, titles and legends.

    Example:
        >>> from bridge.pictures.style import configuration
        >>> configuration().to_dict()["view"]["stroke"] is None
        True
    """
    ink, faint = colour("ink"), colour("faint")
    return alt.Config(
        background=colour("ground"),
        font=FONT,
        view=alt.ViewConfig(stroke=None),
        title=alt.TitleConfig(color=ink, subtitleColor=ink, anchor="start", fontSize=14, fontWeight=600, offset=10),
        axis=alt.AxisConfig(
            labelColor=ink, titleColor=ink, domainColor=faint, tickColor=faint, gridColor=faint, labelFontSize=11,
            titleFontSize=12, titleFontWeight="normal", labelLimit=120, gridOpacity=0.5,
        ),
        header=alt.HeaderConfig(labelColor=ink, titleColor=ink, labelFontSize=11, labelPadding=4),
        legend=alt.LegendConfig(
            labelColor=ink, titleColor=ink, labelFontSize=11, titleFontSize=11, titleFontWeight="normal",
            gradientThickness=10, gradientLength=150, orient="top", direction="horizontal", titleOrient="left",
            titleBaseline="bottom", offset=8,
        ),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and other names as they stand in a picture.
# ----------------------------------------------------------------------------------------------------------------------


_BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")
_SHOWN = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """A token's text with spaces and line ends that can be seen.

    A space is ``·`` but between two words, a line feed ``↵``, a tab ``⇥``, the empty text ``∅``. Other characters
    without a shape, and these signs themselves, are shown by their number, so that no two texts look the same.

    Args:
        text: the token's text.

    Example:
        >>> from bridge.pictures.style import visible
        >>> visible(" Mary"), visible("\\n\\n"), visible("")
        ('·Mary', '↵↵', '∅')
        >>> visible("\\x00"), visible("·"), visible("a random one")
        ('\\\\x00', '\\\\xb7', 'a random one')
    """
    between = {at.start() for at in _BETWEEN_WORDS.finditer(text)}
    return "".join(x if at in between else _shown(x) for at, x in enumerate(text)) or "∅"


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
        >>> from bridge.pictures.style import token_labels
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
        >>> from bridge.pictures.style import lookup
        >>> lookup(["a", "·b"], "datum.value")
        '["a", "\\\\u00b7b"][datum.value]'
    """
    return f"{json.dumps(list(labels))}[{index}]"


def width_of(labels: Sequence[str]) -> int:
    """About how many pixels the longest label takes, at most 120.

    Args:
        labels: what is to be written, in the size of an axis.

    Example:
        >>> from bridge.pictures.style import width_of
        >>> width_of(["abc"]) < width_of(["abcdef"])
        True
    """
    return min(120, 8 + 7 * max(map(wide, labels), default=0))


def wide(text: str) -> int:
    """How many letters' room a text takes.

    Args:
        text: the text.

    Example:
        >>> from bridge.pictures.style import wide
        >>> wide("ab"), wide("日本")
        (2, 4)
    """
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers for a picture: checked, and as few digits as the eye can use.
# ----------------------------------------------------------------------------------------------------------------------


def checked(values: Tensor, what: str, masked: bool = False, absent: Tensor | None = None) -> Tensor:
    """The values as float64 on the CPU, outside of autograd.

    Args:
        values: any tensor of numbers.
        what: what they are, for errors.
        masked: minus infinity may stand where there is nothing.
        absent: of the shape of the values, where a NaN says that there is nothing; None: nowhere.

    Raises:
        TypeError: no tensor, or one of truth values or complex numbers.
        ValueError: it is empty, or holds a NaN or an infinity, which would be a hole in the picture.

    Example:
        >>> import torch
        >>> from bridge.pictures.style import checked
        >>> checked(torch.ones(2, dtype=torch.bfloat16), "scores").dtype
        torch.float64
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"{what} must be a tensor; it is {type(values).__name__}")
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{what} is a tensor of {values.dtype}; a picture needs real numbers")
    if not values.numel():
        raise ValueError(f"{what} of shape {list(values.shape)} hold no value")
    values = values.detach().to("cpu", torch.float64)
    bad = ~values.isfinite()
    if masked:
        bad &= values != -math.inf
    if absent is not None:
        bad &= ~absent
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{what} of shape {list(values.shape)} hold {int(bad.sum())} values that are no finite numbers, the first "
            f"of them {values[tuple(place)].item()} at {place}"
        )
    return values


def without_batch(values: Tensor, ndim: int, what: str) -> Tensor:
    """The values of one prompt.

    Args:
        values: with or without a batch axis of one in front.
        ndim: how many axes there are without it.
        what: what they are, with their axes, for errors.

    Raises:
        ValueError: other axes, or a batch of several.

    Example:
        >>> import torch
        >>> from bridge.pictures.style import without_batch
        >>> without_batch(torch.ones(1, 4, 3), 2, "contributions [layer, head]").shape
        torch.Size([4, 3])
    """
    if values.ndim == ndim:
        return values
    if values.ndim == ndim + 1 and len(values) == 1:
        return values[0]
    several = values.ndim == ndim + 1
    hint = f"; the first axis has {len(values)} rows: take one, [0], or their mean, .mean(0)" if several else ""
    raise ValueError(
        f"{what} are asked for, with a batch axis of 1 or without; the shape is {list(values.shape)}{hint}"
    )


def of_one_prompt(values: Tensor, ndim: int, what: str) -> Tensor:
    """The values of components in one prompt.

    Args:
        values: with or without a batch axis of one after the first.
        ndim: how many axes there are without it.
        what: what they are, with their axes, for errors.

    Raises:
        ValueError: other axes, or a batch of several.

    Example:
        >>> import torch
        >>> from bridge.pictures.style import of_one_prompt
        >>> of_one_prompt(torch.ones(5, 1, 3), 2, "attributions are [component, pos]").shape
        torch.Size([5, 3])
    """
    kept = values.squeeze(1) if values.ndim == ndim + 1 else values
    if kept.ndim != ndim:
        raise ValueError(f"{what}, of one prompt; the shape is {list(values.shape)}")
    return kept


def compact(values: Tensor, digits: int = 3) -> list[float | None]:
    """The values in order, rounded to some digits; None for what is not finite.

    Args:
        values: any shape.
        digits: how many of each number count.

    Example:
        >>> import torch
        >>> from bridge.pictures.style import compact
        >>> compact(torch.tensor([0.123456, -float("inf"), 2.0]))
        [0.123, None, 2]
    """
    return [_rounded(value, digits) for value in values.flatten().tolist()]


def _rounded(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def limit(values: Tensor) -> float:
    """The largest absolute value, of those that are finite.

    Args:
        values: any shape.

    Example:
        >>> import torch
        >>> from bridge.pictures.style import limit
        >>> limit(torch.tensor([-3.0, 2.0]))
        3.0
    """
    finite = values[values.isfinite()]
    return float(f"{finite.abs().max().item():.3g}") if finite.numel() else 0.0


def names_for(labels: Sequence[str] | None, n: int, default: str, what: str) -> list[str]:
    """Given names, or numbered ones.

    Args:
        labels: one name for each; None: `default` and a number.
        n: how many.
        default: such as ``head``.
        what: the argument's name, for errors.

    Raises:
        ValueError: another number of names.

    Example:
        >>> from bridge.pictures.style import names_for
        >>> names_for(None, 2, "head ", "heads")
        ['head 0', 'head 1']
    """
    if labels is None:
        return [f"{default}{index}" for index in range(n)]
    if isinstance(labels, str):
        raise TypeError(f"{what} is {labels!r}; give a list of {n} names")
    if len(labels) != n:
        raise ValueError(f"there are {len(labels)} {what}, and {n} are needed: {list(labels)}")
    return [str(label) for label in labels]
