"""Colours and configuration that all pictures share, in light and dark mode.

Every colour is an expression of one parameter of the picture, ``dark``. The same picture is drawn
on light and dark backgrounds, and a page that switches its background only changes this parameter.
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

#: Colours by purpose, on light and dark backgrounds.
PALETTE: dict[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#131416"),
    "ink": ("#1f2328", "#e4e6ea"),
    "faint": ("#c8ccd2", "#4a4e55"),
    "blank": ("#ececec", "#1f2125"),
    "line": ("#2166ac", "#74b6f0"),
    "accent": ("#b35806", "#ffb066"),
}

#: From strongly negative over zero to strongly positive: orange and blue, which all common kinds of
#: colour vision distinguish (ColorBrewer's PuOr and RdBu ends; Harrower and Brewer 2003), with the
#: background's own tone at zero.
DIVERGING: list[tuple[str, str]] = [
    ("#8f4507", "#ffb066"),
    ("#eba04a", "#b5651d"),
    ("#f7f7f7", "#1b1d21"),
    ("#6baed6", "#2f6ea8"),
    ("#08519c", "#8cc8ff"),
]
#: From zero to the maximum.
SEQUENTIAL: list[tuple[str, str]] = [
    ("#f7f9fc", "#1b1d21"),
    ("#9ecae1", "#2f6ea8"),
    ("#08519c", "#a9d7ff"),
]
#: The point of each scale at which black and white text are equally readable, on light and dark
#: backgrounds: the colour's luminance is 0.179, and both have a contrast of 4.58. Text changes its
#: colour there.
READABLE: dict[str, tuple[float, float]] = {
    "sequential": (0.833, 0.555),
    "positive": (0.78, 0.564),
    "negative": (0.831, 0.48),
}


def dark_parameter() -> alt.Parameter:
    """Return the parameter that says whether the picture's background is dark.

    Example:
        >>> from bridge.pictures.style import dark_parameter
        >>> dark_parameter().name
        'dark'
    """
    return alt.param(name="dark", value=False)


def themed(light: str, dark: str) -> alt.ExprRef:
    """Return a colour that depends on the background.

    Args:
        light, dark: the colour on each background.

    Example:
        >>> from bridge.pictures.style import themed
        >>> themed("#fff", "#000").to_dict()
        {'expr': "dark ? '#000' : '#fff'"}
    """
    return alt.ExprRef(f"dark ? '{dark}' : '{light}'")


def colour(name: str) -> alt.ExprRef:
    """Return a colour of the palette.

    Args:
        name: the colour's purpose, one of `PALETTE`.

    Example:
        >>> from bridge.pictures.style import colour
        >>> colour("ground").to_dict()
        {'expr': "dark ? '#131416' : '#ffffff'"}
    """
    return themed(*PALETTE[name])


def orange_if(test: str) -> Any:
    """Return the colour of a mark that is orange under a condition, and otherwise blue.

    Args:
        test: a Vega expression, such as ``"datum.v < 0"``.

    Example:
        >>> from bridge.pictures.style import orange_if
        >>> orange_if("datum.v < 0")["condition"]["test"]
        'datum.v < 0'
    """
    return alt.condition(test, alt.value(colour("accent")), alt.value(colour("line")))


def diverging(limit: float) -> alt.Scale:
    """Return a scale that is symmetric around zero.

    Args:
        limit: the largest absolute value; 0 counts as 1.

    Example:
        >>> from bridge.pictures.style import diverging
        >>> diverging(4.0).to_dict()["domain"]
        [-4.0, -2.0, 0.0, 2.0, 4.0]
    """
    limit = limit or 1.0
    domain = [-limit, -limit / 2, 0.0, limit / 2, limit]
    return _scale(domain, DIVERGING)


def sequential(limit: float = 1.0) -> alt.Scale:
    """Return a scale from zero.

    Args:
        limit: the largest value; 0 counts as 1.

    Example:
        >>> from bridge.pictures.style import sequential
        >>> sequential(1.0).to_dict()["domain"]
        [0.0, 0.5, 1.0]
    """
    limit = limit or 1.0
    return _scale([0.0, limit / 2, limit], SEQUENTIAL)


def _scale(domain: list[float], colours: list[tuple[str, str]]) -> alt.Scale:
    colour_range = [themed(*pair) for pair in colours]
    return alt.Scale(domain=domain, range=colour_range, clamp=True, interpolate="lab")


def scale_of(values: Tensor) -> alt.Scale:
    """Return the scale of some values: `diverging` if one is negative, otherwise `sequential`.

    Args:
        values: any shape; only finite ones count.

    Example:
        >>> import torch
        >>> from bridge.pictures.style import scale_of
        >>> scale_of(torch.tensor([2.0, 4.0])).to_dict()["domain"]
        [0.0, 2.0, 4.0]
        >>> scale_of(torch.tensor([-1.0, 4.0])).to_dict()["domain"]
        [-4.0, -2.0, 0.0, 2.0, 4.0]
    """
    negative = bool((values[values.isfinite()] < 0).any())
    return diverging(limit(values)) if negative else sequential(limit(values))


def ink_on(strength: str, signed: bool = False) -> dict[str, object]:
    """Return a readable text colour for a coloured cell: its contrast is 4.5 or more.

    Args:
        strength: a Vega expression for the position of the cell's colour on its scale, from 0 to 1,
            or from -1.
        signed: whether the scale is `diverging` and not `sequential`.

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
    """Return a legend with evenly spaced numbers.

    Args:
        scale: the explained scale.
        title: the meaning of the numbers.

    Example:
        >>> from bridge.pictures.style import colour_bar, diverging
        >>> colour_bar(diverging(3.0), "score").to_dict()["values"]
        [-3.0, -1.5, 0.0, 1.5, 3.0]
    """
    return alt.Legend(title=title, values=scale.to_dict()["domain"], format=".3~g", titleLimit=420)


def tooltips(shown: Mapping[str, str], format: str | None = None) -> list[alt.Tooltip]:
    """Return the tooltips of a mark.

    Args:
        shown: for each line its field and its title.
        format: the number format; None: unformatted.

    Example:
        >>> from bridge.pictures.style import tooltips
        >>> tooltips({"w:Q": "weight"})[0].to_dict()
        {'field': 'w', 'title': 'weight', 'type': 'quantitative'}
    """
    options: dict[str, Any] = {} if format is None else {"format": format}
    return [alt.Tooltip(field, title=title, **options) for field, title in shown.items()]


def configuration() -> alt.Config:
    """Return the fonts, lines and colours of axes, titles and legends.

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
        title=alt.TitleConfig(
            color=ink, subtitleColor=ink, anchor="start", fontSize=14, fontWeight=600, offset=10
        ),
        axis=alt.AxisConfig(
            labelColor=ink,
            titleColor=ink,
            domainColor=faint,
            tickColor=faint,
            gridColor=faint,
            labelFontSize=11,
            titleFontSize=12,
            titleFontWeight="normal",
            labelLimit=120,
            gridOpacity=0.5,
        ),
        header=alt.HeaderConfig(labelColor=ink, titleColor=ink, labelFontSize=11, labelPadding=4),
        legend=alt.LegendConfig(
            labelColor=ink,
            titleColor=ink,
            labelFontSize=11,
            titleFontSize=11,
            titleFontWeight="normal",
            gradientThickness=10,
            gradientLength=150,
            orient="top",
            direction="horizontal",
            titleOrient="left",
            titleBaseline="bottom",
            offset=8,
        ),
    )


# --------------------------------------------------------------------------------------------------
# Tokens and other names as displayed in a picture.
# --------------------------------------------------------------------------------------------------


_BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")
_SHOWN = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """Return a token's text with visible spaces and line ends.

    A space is ``·`` except between two words, a line feed ``↵``, a tab ``⇥``, the empty text ``∅``.
    Other invisible characters, and these signs themselves, are shown by their code, so that no two
    texts look the same.

    Args:
        text: the token's text.

    Example:
        >>> from bridge.pictures.style import visible
        >>> visible(" Mary"), visible("\\n\\n"), visible("")
        ('·Mary', '↵↵', '∅')
        >>> visible("\\x00"), visible("·"), visible("a random one")
        ('\\\\x00', '\\\\xb7', 'a random one')
    """
    kept = {match.start() for match in _BETWEEN_WORDS.finditer(text)}
    shown = [char if i in kept else _shown(char) for i, char in enumerate(text)]
    return "".join(shown) or "∅"


def _shown(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    if character == "\\":
        return "\\\\"
    invisible = unicodedata.category(character)[0] in "CZ"
    if not invisible and character not in (*_SHOWN.values(), "∅"):
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"


def token_labels(tokens: Sequence[str], n: int, what: str = "tokens") -> list[str]:
    """Return the labels of positions, one for each.

    Args:
        tokens: the text of each position.
        n: the number of positions.
        what: the argument's name, for errors.

    Raises:
        TypeError: the tokens are not a list of texts.
        ValueError: the number of texts is wrong.

    Example:
        >>> from bridge.pictures.style import token_labels
        >>> token_labels(["<bos>", " Mary"], 2)
        ['<bos>', '·Mary']
    """
    if isinstance(tokens, str | Tensor) or not all(isinstance(token, str) for token in tokens):
        raise TypeError(
            f"{what} is {type(tokens).__name__} {_short(tokens)}; give a list with the text of each"
            " position, such as bridge.to_str_tokens(prompt)"
        )
    if len(tokens) != n:
        raise ValueError(
            f"there are {len(tokens)} {what}, and {n} positions in the values:"
            f" {_short(list(tokens))}"
        )
    return [visible(token) for token in tokens]


def _short(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) < 80 else f"{text[:76]} ..."


def lookup(labels: Sequence[str], index: str) -> str:
    """Return a Vega expression for the label of a number.

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
    """Return the approximate width of the longest label in pixels, at most 120.

    Args:
        labels: the labels, in the font size of an axis.

    Example:
        >>> from bridge.pictures.style import width_of
        >>> width_of(["abc"]) < width_of(["abcdef"])
        True
    """
    return min(120, 8 + 7 * max(map(wide, labels), default=0))


def wide(text: str) -> int:
    """Return the width of a text in letters.

    Args:
        text: the text.

    Example:
        >>> from bridge.pictures.style import wide
        >>> wide("ab"), wide("日本")
        (2, 4)
    """
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


# --------------------------------------------------------------------------------------------------
# Numbers for a picture: checked, and rounded to the visible digits.
# --------------------------------------------------------------------------------------------------


def checked(
    values: Tensor, what: str, masked: bool = False, absent: Tensor | None = None
) -> Tensor:
    """Return the values as float64 on the CPU, detached from autograd.

    Args:
        values: any tensor of numbers.
        what: a description of the values, for errors.
        masked: whether minus infinity may mark missing values.
        absent: a mask, in the shape of the values, of entries where NaN marks a missing value;
            None: nowhere.

    Raises:
        TypeError: not a tensor, or a tensor of booleans or complex numbers.
        ValueError: the tensor is empty, or has a NaN or an infinity, which would be a blank in the
            picture.

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
            f"{what} of shape {list(values.shape)} hold {int(bad.sum())} values that are no finite"
            f" numbers, the first of them {values[tuple(place)].item()} at {place}"
        )
    return values


def without_batch(values: Tensor, ndim: int, what: str) -> Tensor:
    """Return the values of one prompt.

    Args:
        values: with or without a leading batch axis of one.
        ndim: the number of axes without the batch axis.
        what: a description of the values with their axes, for errors.

    Raises:
        ValueError: unsupported axes, or a batch of several.

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
    hint = ""
    if values.ndim == ndim + 1:
        hint = f"; the first axis has {len(values)} rows: take one, [0], or their mean, .mean(0)"
    raise ValueError(
        f"{what} are asked for, with a batch axis of 1 or without; the shape is"
        f" {list(values.shape)}{hint}"
    )


def of_one_prompt(values: Tensor, ndim: int, what: str) -> Tensor:
    """Return the values of components in one prompt.

    Args:
        values: with or without a batch axis of one after the first.
        ndim: the number of axes without the batch axis.
        what: a description of the values with their axes, for errors.

    Raises:
        ValueError: unsupported axes, or a batch of several.

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
    """Return the values in order, rounded to some digits; None for values that are not finite.

    Args:
        values: any shape.
        digits: the number of significant digits.

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
    """Return the largest absolute value among the finite ones.

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
    """Return the names if there are any, or numbered ones.

    Args:
        labels: one name for each; None: `default` and a number.
        n: the number of names.
        default: the prefix of numbered names, such as ``head``.
        what: the argument's name, for errors.

    Raises:
        ValueError: the number of names is wrong.

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
