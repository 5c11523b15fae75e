"""Running text whose tokens are coloured by a number, and text in which a token lights what it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
from jaxtyping import Float
from torch import Tensor

from bridge.hooks.asked import StudiedBridge
from bridge.pictures.heat_maps import Axis, grid
from bridge.pictures.pictures import Picture, finished, rows_chart
from bridge.pictures.style import (
    checked,
    colour,
    colour_bar,
    compact,
    diverging,
    ink_on,
    limit,
    lookup,
    names_for,
    of_one_prompt,
    sequential,
    token_labels,
    tooltips,
    visible,
    wide,
    without_batch,
)

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
    tooltip = tooltips({"p:Q": "position", "token:N": "token", "v:Q": measure})
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
        tooltip=tooltips({"p:Q": "position", "token:N": "token"}),
    )
    tips = tooltips({"of:N": "query", "token:N": "key"}) + tooltips({"w:Q": "mean weight"}, ".3~g")
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


# ----------------------------------------------------------------------------------------------------------------------
# The logit lens: tokens in cells.
# ----------------------------------------------------------------------------------------------------------------------


def logit_lens(
    logits: Float[Tensor, "..."],
    tokens: Sequence[str],
    model: StudiedBridge,
    *,
    rows: Sequence[str] | None = None,
    top: int = 5,
    title: str = "Logit lens",
) -> Picture:
    """What the model would say next if it ended after each layer: the likeliest token in each cell.

    The colour is its probability; hovering shows the likeliest few (nostalgebraist 2020, "interpreting GPT: the logit
    lens").

    Args:
        logits: what `bridge.analysis.logit_lens.logit_lens` returned, ``[layer, pos, d_vocab]``, with a batch axis of 1
            after the first or without.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        model: the bridge, which knows the text of its tokens.
        rows: a name for each layer; None: ``embed``, 0, 1, ...
        top: how many tokens hovering shows.
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, another number of tokens, a value that is not finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> from bridge.analysis.logit_lens import logit_lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> lens = logit_lens(bridge, bridge.to_tokens("Mary and John"))
        >>> pictures.logit_lens(lens, bridge.to_str_tokens("Mary and John"), bridge)
        Picture('Logit lens')
    """
    values = _of_one_prompt(logits)
    n_layers, n_pos, d_vocab = values.shape
    if not 1 <= top <= d_vocab:
        raise ValueError(f"top is {top}; it must be from 1 to {d_vocab}")
    columns = token_labels(tokens, n_pos)
    layers = _layers(rows, n_layers)
    best = values.softmax(-1).topk(top, dim=-1)
    known: dict[int, str] = {}
    for token in best.indices.flatten().unique().tolist():
        known[token] = visible(model.to_single_str_token(token))
    cell = _cell([*known.values(), *columns], n_pos)
    cells = []
    for layer in range(n_layers):
        for position in range(n_pos):
            found = [known[token] for token in best.indices[layer, position].tolist()]
            shares = compact(best.values[layer, position])
            cells.append(
                {"l": layer, "p": position, "v": shares[0], "t": _cut(found[0], cell)}
                | {f"k{i}": f"{text} {share}" for i, (text, share) in enumerate(zip(found, shares, strict=True))}
            )
    base = (
        rows_chart(cells)
        .transform_calculate(row=lookup(layers, "datum.l"), column=lookup(columns, "datum.p"))
        .encode(
            x=alt.X("p:O", axis=alt.Axis(
                title="position", orient="top", labelExpr=lookup([_cut(c, cell) for c in columns], "datum.value"),
                labelAngle=0, ticks=False, domain=False,
            )),
            y=alt.Y("l:O", axis=alt.Axis(
                title="after layer", labelExpr=lookup(layers, "datum.value"), ticks=False, domain=False
            )),
            tooltip=tooltips(
                {"row:N": "after layer", "column:N": "at token", **{f"k{i}:N": str(i + 1) for i in range(top)}}
            ),
        )
    )  # fmt: skip
    legend = colour_bar(sequential(), "probability")
    rects = base.mark_rect(stroke=colour("ground"), strokeWidth=1).encode(
        color=alt.Color("v:Q", scale=sequential(), legend=legend)
    )
    words = base.mark_text(fontSize=10).encode(text="t:N", color=ink_on("datum.v"))
    return finished(rects + words, title, width=alt.Step(cell), height=alt.Step(22))


def chosen_lens(
    logits: Float[Tensor, "..."],
    tokens: Sequence[str],
    model: StudiedBridge,
    chosen: Sequence[str],
    *,
    rows: Sequence[str] | None = None,
    title: str = "Logit lens of chosen tokens",
) -> Picture:
    """How probable some tokens would be if the model ended after each layer: a panel for each token.

    Args:
        logits, tokens: as for `logit_lens`.
        model: the bridge, which knows its words.
        chosen: the tokens, as text: ``[" Mary", " John"]``.
        rows: a name for each layer; None: ``embed``, 0, 1, ...
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, no chosen token, or a text that is not one token.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> from bridge.analysis.logit_lens import logit_lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> lens = logit_lens(bridge, bridge.to_tokens("Mary and John"))
        >>> pictures.chosen_lens(lens, bridge.to_str_tokens("Mary and John"), bridge, [" Mary", " John"])
        Picture('Logit lens of chosen tokens')
    """
    values = _of_one_prompt(logits)
    if isinstance(chosen, str) or not chosen:
        raise ValueError(f"chosen is {chosen!r}; give a list of one or more tokens, such as [' Mary', ' John']")
    columns = token_labels(tokens, values.shape[1])
    layers = _layers(rows, len(values))
    odds = values.softmax(-1)[..., [model.to_single_token(text) for text in chosen]].permute(2, 0, 1)
    across = max(5.0, min(26.0, 480 / len(columns)))
    return grid(
        odds, Axis("after layer", layers, max(8.0, min(18.0, 360 / len(layers)))), Axis("token", columns, across),
        sequential(), "probability", title, panels=[visible(text) for text in chosen],
        panels_wide=max(1, int(1000 // (across * len(columns) + 60))),
    )  # fmt: skip


def _of_one_prompt(logits: Tensor) -> Tensor:
    return of_one_prompt(checked(logits, "the logits"), 3, "the logits of a lens are [layer, pos, d_vocab]")


def _layers(rows: Sequence[str] | None, n: int) -> list[str]:
    return ["embed", *map(str, range(n - 1))] if rows is None else names_for(rows, n, "", "rows")


def _cell(texts: Sequence[str], n_pos: int) -> int:
    """The pixels of a cell: as wide as its words, but narrower where there are many."""
    longest = max(map(wide, texts))
    return max(34, min(8 + 6 * longest, 80 if n_pos <= 10 else 52))


def _cut(text: str, cell: int) -> str:
    """The text, or as much of it as fits into a cell."""
    room = (cell - 4) // 6
    if wide(text) <= room:
        return text
    kept = ""
    for character in text:
        if wide(kept + character) > room - 1:
            break
        kept += character
    return f"{kept}…"
