"""Colours and configuration that all pictures share, in light and dark.

Every colour is an expression of one parameter of the picture, ``dark``: the same picture is drawn on light and on dark
ground, and a page that changes its ground changes that parameter and nothing else.
"""

from __future__ import annotations

import altair as alt

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
