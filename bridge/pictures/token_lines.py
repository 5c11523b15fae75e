"""Running text whose tokens are coloured by a number, and text in which a token lights what it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
from jaxtyping import Float
from torch import Tensor

from bridge.pictures.labels import lookup, token_labels, wide
from bridge.pictures.picture import Picture, finished, rows_chart
from bridge.pictures.style import colour, colour_bar, diverging, ink_on, sequential
from bridge.pictures.values import checked, compact, limit, names_for, without_batch

#: The pixels of a character and of a line.
_LETTER, _LINE = 7.4, 26
#: The pixels that a line of text takes.
_WIDE = 640
#: Whether a head is on, whose number is a field.
_ON = "indexof(switched.p || [], datum.{}) >= 0"
_FONT = "ui-monospace, 'Liberation Mono', 'DejaVu Sans Mono', monospace"


def tokens(
    values: Float[Tensor, "..."],
    tokens: Sequence[str],
    *,
    measure: str = "value",
    title: str = "Tokens",
) -> Picture:
    """A text with each token coloured by a number: its loss, an activation, a feature. Hovering says the number.

    Args:
        values: one for each token, ``[pos]``, with a batch axis of 1 in front or without. A value that no token has
            (there is no loss of the first) is left out with its token.
        tokens: the text of each: ``bridge.to_str_tokens(prompt)``.
        measure: what the numbers are.
        title: over the picture.

    Raises:
        ValueError: another number of tokens, a batch of several prompts, a value that is not finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> loss = bridge("Mary and John", return_type="loss", loss_per_token=True)
        >>> pictures.tokens(loss, bridge.to_str_tokens("Mary and John")[1:], measure="loss in nats")
        Picture('Tokens')
    """
    table = without_batch(checked(values, "the values"), 1, "values of tokens [pos]")
    labels = token_labels(tokens, len(table))
    scale = diverging(limit(table)) if bool((table < 0).any()) else sequential(limit(table))
    text = _Text(labels)
    base = text.chart(v=compact(table), token=labels)
    tooltip = [
        alt.Tooltip("p:Q", title="position"),
        alt.Tooltip("token:N", title="token"),
        alt.Tooltip("v:Q", title=measure),
    ]
    domain = scale.to_dict()["domain"]
    shade = alt.Color("v:Q", scale=scale, legend=colour_bar(scale, measure))
    cells = text.cells(base).encode(color=shade, tooltip=tooltip)
    words = text.words(base).encode(color=ink_on(f"datum.v / {domain[-1]}", signed=domain[0] < 0))
    return finished(cells + words, title, width=_WIDE, height=text.high)


def attention_text(
    pattern: Float[Tensor, "..."],
    tokens: Sequence[str],
    *,
    heads: Sequence[str] | None = None,
    title: str = "What a token attends to",
) -> Picture:
    """The text of a prompt: a token that is pointed at lights those that it attends to, by the mean of some heads.

    In HTML, a click on a head switches it off or on. At first all are on, and the last token is pointed at.

    Args:
        pattern: ``cache["pattern", layer]``, ``[head, query, key]``, with a batch axis of 1 in front or without.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        heads: a name for each head; None: its number.
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, weights outside of 0 to 1, names of another number.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> _, cache = bridge.run_with_cache("Mary and John")
        >>> pictures.attention_text(cache["pattern", 2], bridge.to_str_tokens("Mary and John"))
        Picture('What a token attends to')
    """
    table = without_batch(checked(pattern, "the pattern"), 3, "patterns [head, query, key]")
    n_heads, n, n_keys = table.shape
    if n != n_keys:
        raise ValueError(f"the pattern of shape {list(table.shape)} has other keys than queries: `attention` shows it")
    if bool((table < 0).any()) or bool((table > 1 + 1e-3).any()):
        raise ValueError("the pattern holds values outside of 0 to 1: give hook_pattern, not hook_attn_scores")
    labels, names = token_labels(tokens, n), names_for(heads, n_heads, "head ", "heads")
    text = _Text(labels)
    pointed = alt.selection_point(name="pointed", fields=["p"], on="pointerover", toggle=False, clear=False)
    all_on: Any = [{"p": head} for head in range(n_heads)]
    switched = alt.selection_point(name="switched", fields=["p"], on="click", toggle="true", clear=False, value=all_on)
    at = f"(isValid(pointed.p) && isValid(pointed.p[0]) ? pointed.p[0] : {n - 1})"
    weights = (
        rows_chart(compact(table))
        .transform_window(n="row_number()")
        .transform_calculate(
            h=f"floor((datum.n - 1) / {n * n})", q=f"floor((datum.n - 1) / {n}) % {n}", p=f"(datum.n - 1) % {n}"
        )
        .transform_filter(f"datum.q === {at} && {_ON.format('h')}")
        .transform_aggregate(w="mean(data)", groupby=["p"])
        .transform_lookup("p", from_=alt.LookupData(alt.Data(values=text.rows), "p", ["x0", "x1", "y0", "y1", "ym"]))  # type: ignore[arg-type]
        .transform_calculate(token=lookup(labels, "datum.p"), of=f"{lookup(labels, at)}")
    )
    scale, base = sequential(), text.chart(token=labels)
    shade = alt.Color("w:Q", scale=scale, legend=colour_bar(scale, "mean weight"))
    off = alt.condition("!isValid(switched.p) || !switched.p.length", alt.value(1), alt.value(0))
    frame = text.cells(base).encode(
        stroke=alt.condition(f"datum.p === {at}", alt.value(colour("accent")), alt.value("transparent")),
        strokeWidth=alt.value(2),
        fill=alt.value("transparent"),
        tooltip=[alt.Tooltip("p:Q", title="position"), alt.Tooltip("token:N", title="token")],
    )
    tips = [alt.Tooltip("of:N", title="query"), alt.Tooltip("token:N", title="key"),
            alt.Tooltip("w:Q", title="mean weight", format=".3~g")]  # fmt: skip
    lines = alt.layer(
        text.cells(weights).encode(color=shade, tooltip=tips),
        text.words(weights).encode(color=ink_on("datum.w")),
        text.words(base).encode(color=alt.value(colour("ink")), opacity=off),  # with all heads off
        frame.add_params(pointed),
    ).properties(width=_WIDE, height=text.high)
    told = alt.Title(title, subtitle="point at a token; click a head to switch it off or on")
    return finished(alt.vconcat(lines, _switches(names, switched), spacing=10), told)


def _switches(names: Sequence[str], switched: alt.Parameter) -> alt.LayerChart | alt.FacetChart:
    """A box for each head, filled while it is on."""
    text = _Text([f" {name} " for name in names])
    rows = [{"name": name, **row} for name, row in zip(names, text.rows, strict=True)]
    base = rows_chart(rows)
    boxes = text.cells(base).encode(
        fill=alt.condition(_ON.format("p"), alt.value(colour("line")), alt.value(colour("ground"))),
        stroke=alt.value(colour("ink")),
        tooltip=alt.Tooltip("name:N", title="head"),
    )
    words = text.words(base.transform_calculate(token="' ' + datum.name")).encode(
        color=alt.condition(_ON.format("p"), alt.value(colour("ground")), alt.value(colour("ink")))
    )
    return alt.layer(boxes.add_params(switched), words).properties(width=_WIDE, height=text.high)


class _Text:
    """Words in lines.

    Args:
        words: the words; a line feed ends a line.

    Attributes:
        rows: for each its number ``p`` and its place in pixels.
        high: how high all lines are.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.rows: list[dict[str, Any]] = []
        at, line = 0.0, 0
        for p, word in enumerate(words):
            size = min(_WIDE, round(wide(word) * _LETTER + 8))
            if at + size > _WIDE:
                at, line = 0.0, line + 1
            y = line * _LINE
            place = {"x0": at, "x1": at + size, "y0": y + 1, "y1": y + _LINE - 1, "ym": y + _LINE / 2}
            self.rows.append({"p": p, **place})
            at += size
            if "↵" in word:
                at, line = 0.0, line + 1
        self.high = (line + (at > 0)) * _LINE

    def chart(self, **columns: Sequence[Any]) -> alt.Chart:
        """A row for each word, with more columns."""
        rows = [row | {name: column[i] for name, column in columns.items()} for i, row in enumerate(self.rows)]
        return rows_chart(rows)

    def cells(self, base: alt.Chart) -> alt.Chart:
        """A rectangle behind each word."""
        return base.mark_rect(cornerRadius=3).encode(x=self._x(), x2="x1:Q", y=self._y("y0"), y2="y1:Q")

    def words(self, base: alt.Chart) -> alt.Chart:
        """The words."""
        marks = base.mark_text(align="left", dx=4, fontSize=12, font=_FONT, tooltip=False)
        return marks.encode(x=self._x(), y=self._y("ym"), text="token:N")

    def _x(self) -> alt.X:
        return alt.X("x0:Q", axis=None, scale=alt.Scale(domain=[0, _WIDE], nice=False))

    def _y(self, name: str) -> alt.Y:
        return alt.Y(f"{name}:Q", axis=None, scale=alt.Scale(domain=[0, self.high], nice=False, reverse=True))
