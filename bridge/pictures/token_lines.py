"""Text with tokens coloured by a number, and text that highlights what a token attends to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from jaxtyping import Float, Int
from torch import Tensor

from bridge.hooks.studied_bridge import StudiedBridge
from bridge.pictures.heat_maps import Axis, grid
from bridge.pictures.pictures import Picture, finished, rows_chart
from bridge.pictures.results import draws_results
from bridge.pictures.style import (
    checked,
    colour,
    colour_bar,
    compact,
    ink_on,
    lookup,
    names_for,
    of_one_prompt,
    scale_of,
    sequential,
    token_labels,
    tooltips,
    visible,
    wide,
    without_batch,
)

#: The pixels of a character and of a line.
_LETTER, _LINE = 7.4, 26
#: The width of a line of text in pixels.
_WIDE = 640
#: A Vega expression for whether the head with a field's number is on.
_ON = "indexof(switched.p || [], datum.{}) >= 0"
_FONT = "ui-monospace, 'Liberation Mono', 'DejaVu Sans Mono', monospace"


def tokens(
    values: Float[Tensor, "..."],
    tokens: Sequence[str],
    *,
    measure: str = "value",
    title: str = "Tokens",
) -> Picture:
    """Draw a text with each token coloured by a number: its loss, an activation, a feature.
    Hovering shows it.

    Args:
        values: one number for each token, ``[pos]``, with or without a leading batch axis of 1. If
            a token has no value (the first token has no loss), omit the value and the token.
        tokens: the text of each: ``bridge.to_str_tokens(prompt)``.
        measure: the meaning of the numbers.
        title: the picture's title.

    Raises:
        ValueError: a wrong number of tokens, a batch of several prompts, a value that is not
            finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> loss = bridge("Mary and John", return_type="loss", loss_per_token=True)
        >>> pictures.tokens(loss, bridge.to_str_tokens("Mary and John")[1:], measure="loss in nats")
        Picture('Tokens')
    """
    table = without_batch(checked(values, "the values"), 1, "values of tokens [pos]")
    labels = token_labels(tokens, len(table))
    scale = scale_of(table)
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
    """Draw a prompt's text: hovering over a token highlights the tokens it attends to, averaged
    over some heads.

    In HTML, a click on a head switches it off or on. Initially all heads are on, and the last token
    is selected.

    Args:
        pattern: ``cache["pattern", layer]``, ``[head, query, key]``, with or without a leading
            batch axis of 1.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        heads: a name for each head; None: its number.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, weights outside 0 to 1, a wrong
            number of names.

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
        raise ValueError(
            f"the pattern of shape {list(table.shape)} has other keys than queries: `attention`"
            " shows it"
        )
    if bool((table < 0).any()) or bool((table > 1 + 1e-3).any()):
        raise ValueError(
            "the pattern holds values outside of 0 to 1: give hook_pattern, not hook_attn_scores"
        )
    labels = token_labels(tokens, n)
    names = names_for(heads, n_heads, "head ", "heads")
    text = _Text(labels)
    pointed = alt.selection_point(
        name="pointed", fields=["p"], on="pointerover", toggle=False, clear=False
    )
    all_on: Any = [{"p": head} for head in range(n_heads)]
    switched = alt.selection_point(
        name="switched", fields=["p"], on="click", toggle="true", clear=False, value=all_on
    )
    query = f"(isValid(pointed.p) && isValid(pointed.p[0]) ? pointed.p[0] : {n - 1})"
    weights = _weights_of_query(table, text, labels, query)
    base = text.chart(token=labels)
    lines = alt.layer(
        *_lit_words(text, weights),
        _words_if_all_off(text, base),
        _frame(text, base, query).add_params(pointed),
    ).properties(width=_WIDE, height=text.high)
    heading = alt.Title(title, subtitle="point at a token; click a head to switch it off or on")
    return finished(alt.vconcat(lines, _switches(names, switched), spacing=10), heading)


def _weights_of_query(table: Tensor, text: _Text, labels: Sequence[str], query: str) -> alt.Chart:
    """Return a chart of the attention from a query to each token, averaged over the heads that are
    switched on, with the token's coordinates.

    Args:
        table: the patterns, ``[head, query, key]``.
        text: the words, with their coordinates.
        labels: the words' labels.
        query: a Vega expression for the query's position.
    """
    n = len(labels)
    rows = alt.Data(values=text.rows)  # type: ignore[arg-type]
    places = alt.LookupData(rows, "p", ["x0", "x1", "y0", "y1", "ym"])
    return (
        rows_chart(compact(table))
        .transform_window(n="row_number()")
        .transform_calculate(
            h=f"floor((datum.n - 1) / {n * n})",
            q=f"floor((datum.n - 1) / {n}) % {n}",
            p=f"(datum.n - 1) % {n}",
        )
        .transform_filter(f"datum.q === {query} && {_ON.format('h')}")
        .transform_aggregate(w="mean(data)", groupby=["p"])
        .transform_lookup("p", from_=places)
        .transform_calculate(token=lookup(labels, "datum.p"), of=lookup(labels, query))
    )


def _lit_words(text: _Text, weights: alt.Chart) -> list[alt.Chart]:
    """Return the words, coloured by their weights."""
    scale = sequential()
    shade = alt.Color("w:Q", scale=scale, legend=colour_bar(scale, "mean weight"))
    tooltip = tooltips({"of:N": "query", "token:N": "key"})
    tooltip += tooltips({"w:Q": "mean weight"}, ".3~g")
    cells = text.cells(weights).encode(color=shade, tooltip=tooltip)
    return [cells, text.words(weights).encode(color=ink_on("datum.w"))]


def _words_if_all_off(text: _Text, base: alt.Chart) -> alt.Chart:
    """Return the words, visible while all heads are off."""
    all_off = "!isValid(switched.p) || !switched.p.length"
    opacity = alt.condition(all_off, alt.value(1), alt.value(0))
    return text.words(base).encode(color=alt.value(colour("ink")), opacity=opacity)


def _frame(text: _Text, base: alt.Chart, query: str) -> alt.Chart:
    """Return a frame around the query. (Every word gets a frame; the others are transparent.)"""
    accent = alt.value(colour("accent"))
    stroke = alt.condition(f"datum.p === {query}", accent, alt.value("transparent"))
    return text.cells(base).encode(
        stroke=stroke,
        strokeWidth=alt.value(2),
        fill=alt.value("transparent"),
        tooltip=tooltips({"p:Q": "position", "token:N": "token"}),
    )


def _switches(names: Sequence[str], switched: alt.Parameter) -> alt.LayerChart | alt.FacetChart:
    """Return a box for each head, filled while the head is on."""
    text = _Text([f" {name} " for name in names])
    rows = [{"name": name, **row} for name, row in zip(names, text.rows, strict=True)]
    base = rows_chart(rows)
    on = _ON.format("p")
    ground = alt.value(colour("ground"))
    ink = alt.value(colour("ink"))
    boxes = text.cells(base).encode(
        fill=alt.condition(on, alt.value(colour("line")), ground),
        stroke=ink,
        tooltip=alt.Tooltip("name:N", title="head"),
    )
    words = text.words(base.transform_calculate(token="' ' + datum.name"))
    words = words.encode(color=alt.condition(on, ground, ink))
    return alt.layer(boxes.add_params(switched), words).properties(width=_WIDE, height=text.high)


class _Text:
    """The words of a text, arranged in lines.

    Args:
        words: the words; a line feed ends a line.

    Attributes:
        rows: the number ``p`` of each word and its place in pixels.
        high: the total height of the lines.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.rows: list[dict[str, Any]] = []
        x = 0.0
        line = 0
        for p, word in enumerate(words):
            size = min(_WIDE, round(wide(word) * _LETTER + 8))
            if x + size > _WIDE:
                x = 0.0
                line += 1
            y = line * _LINE
            row = {
                "p": p,
                "x0": x,
                "x1": x + size,
                "y0": y + 1,
                "y1": y + _LINE - 1,
                "ym": y + _LINE / 2,
            }
            self.rows.append(row)
            x += size
            if "↵" in word:
                x = 0.0
                line += 1
        self.high = (line + (x > 0)) * _LINE

    def chart(self, **columns: Sequence[Any]) -> alt.Chart:
        """Return a row for each word, with more columns."""
        rows = []
        for i, row in enumerate(self.rows):
            values = {name: column[i] for name, column in columns.items()}
            rows.append(row | values)
        return rows_chart(rows)

    def cells(self, base: alt.Chart) -> alt.Chart:
        """Return a rectangle behind each word."""
        return base.mark_rect(cornerRadius=3).encode(
            x=self._x(), x2="x1:Q", y=self._y("y0"), y2="y1:Q"
        )

    def words(self, base: alt.Chart) -> alt.Chart:
        """Return the words."""
        marks = base.mark_text(align="left", dx=4, fontSize=12, font=_FONT, tooltip=False)
        return marks.encode(x=self._x(), y=self._y("ym"), text="token:N")

    def _x(self) -> alt.X:
        return alt.X("x0:Q", axis=None, scale=alt.Scale(domain=[0, _WIDE], nice=False))

    def _y(self, name: str) -> alt.Y:
        scale = alt.Scale(domain=[0, self.high], nice=False, reverse=True)
        return alt.Y(f"{name}:Q", axis=None, scale=scale)


# --------------------------------------------------------------------------------------------------
# The logit lens: tokens in cells.
# --------------------------------------------------------------------------------------------------


@draws_results
def logit_lens(
    logits: Float[Tensor, "..."],
    tokens: Sequence[str],
    model: StudiedBridge,
    *,
    rows: Sequence[str] | None = None,
    top: int = 5,
    title: str = "Logit lens",
) -> Picture:
    """Draw the model's next-token prediction after each layer: the likeliest token in each cell.

    The colour is the token's probability; hovering shows the likeliest few (nostalgebraist 2020,
    "interpreting GPT: the logit lens").

    Args:
        logits: the result of `bridge.analysis.logit_lens.logit_lens`, ``[layer, pos, d_vocab]``,
            with or without a batch axis of 1 after the first; or a `Reading` alone, with its own
            options (``pictures.logit_lens(reading, row=0)``).
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        model: the bridge, which decodes the tokens.
        rows: a name for each layer; None: ``embed``, 0, 1, ...
        top: the number of tokens in a tooltip.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, a wrong number of tokens, a value
            that is not finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> from bridge.analysis.logit_lens import logit_lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> lens = logit_lens(bridge, bridge.to_tokens("Mary and John"))
        >>> pictures.logit_lens(lens, bridge.to_str_tokens("Mary and John"), bridge)
        Picture('Logit lens')
    """
    values = _of_one_prompt(logits)
    d_vocab = values.shape[-1]
    if not 1 <= top <= d_vocab:
        raise ValueError(f"top is {top}; it must be from 1 to {d_vocab}")
    best = values.softmax(-1).topk(top, dim=-1)
    return likeliest_tokens(best.indices, best.values, tokens, model, rows=rows, title=title)


def likeliest_tokens(
    indices: Int[Tensor, "layer pos k"],
    probabilities: Float[Tensor, "layer pos k"],
    tokens: Sequence[str],
    model: StudiedBridge,
    *,
    rows: Sequence[str] | None = None,
    title: str = "Logit lens",
) -> Picture:
    """Draw the picture of `logit_lens` from the likeliest tokens alone.

    Args:
        indices, probabilities: of each layer's likeliest tokens, the likeliest first.
        tokens, model, rows, title: as for `logit_lens`.
    """
    n_layers, n_pos, top = indices.shape
    columns = token_labels(tokens, n_pos)
    layers = _layers(rows, n_layers)
    words: dict[int, str] = {}
    for token in indices.unique().tolist():
        words[token] = visible(model.to_single_str_token(token))
    cell = _cell([*words.values(), *columns], n_pos)
    rows_of_cells = _rows_of_lens(indices, probabilities, words, cell)
    base = _lens_cells(rows_of_cells, layers, columns, cell, top)
    legend = colour_bar(sequential(), "probability")
    color = alt.Color("v:Q", scale=sequential(), legend=legend)
    rects = base.mark_rect(stroke=colour("ground"), strokeWidth=1).encode(color=color)
    labels = base.mark_text(fontSize=10).encode(text="t:N", color=ink_on("datum.v"))
    return finished(rects + labels, title, width=alt.Step(cell), height=alt.Step(22))


def _rows_of_lens(
    indices: Tensor, probabilities: Tensor, words: Mapping[int, str], cell: int
) -> list[dict[str, Any]]:
    """Return a row for each cell of a logit lens: its place, the likeliest token and its
    probability, and the texts of its tooltip.
    """
    rows = []
    for layer, position in itertools.product(*map(range, indices.shape[:2])):
        likeliest = [words[token] for token in indices[layer, position].tolist()]
        shares = compact(probabilities[layer, position])
        row = {"l": layer, "p": position, "v": shares[0], "t": _cut(likeliest[0], cell)}
        for i, (text, share) in enumerate(zip(likeliest, shares, strict=True)):
            row[f"k{i}"] = f"{text} {share}"
        rows.append(row)
    return rows


def _lens_cells(
    rows: list[dict[str, Any]], layers: Sequence[str], columns: Sequence[str], cell: int, top: int
) -> alt.Chart:
    """Return the cells of a logit lens in their places, without marks.

    Args:
        rows: the cells.
        layers, columns: the labels of both axes.
        cell: the width of a cell in pixels.
        top: the number of tokens in a tooltip.
    """
    plain: dict[str, Any] = {"ticks": False, "domain": False}
    short = [_cut(column, cell) for column in columns]
    position = alt.Axis(
        title="position",
        orient="top",
        labelExpr=lookup(short, "datum.value"),
        labelAngle=0,
        **plain,
    )
    layer = alt.Axis(title="after layer", labelExpr=lookup(layers, "datum.value"), **plain)
    shown = {"row:N": "after layer", "column:N": "at token"}
    for i in range(top):
        shown[f"k{i}:N"] = str(i + 1)
    chart = rows_chart(rows).transform_calculate(
        row=lookup(layers, "datum.l"), column=lookup(columns, "datum.p")
    )
    return chart.encode(
        x=alt.X("p:O", axis=position),
        y=alt.Y("l:O", axis=layer),
        tooltip=tooltips(shown),
    )


def chosen_lens(
    logits: Float[Tensor, "..."],
    tokens: Sequence[str],
    model: StudiedBridge,
    chosen: Sequence[str],
    *,
    rows: Sequence[str] | None = None,
    title: str = "Logit lens of chosen tokens",
) -> Picture:
    """Draw the probability of some tokens if the model ended after each layer: a panel for each
    token.

    Args:
        logits, tokens: as for `logit_lens`.
        model: the bridge, which encodes the tokens.
        chosen: the tokens, as text: ``[" Mary", " John"]``.
        rows: a name for each layer; None: ``embed``, 0, 1, ...
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, no chosen token, or a text that is
            not one token.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> from bridge.analysis.logit_lens import logit_lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> lens = logit_lens(bridge, bridge.to_tokens("Mary and John"))
        >>> pictures.chosen_lens(
        ...     lens, bridge.to_str_tokens("Mary and John"), bridge, [" Mary", " John"]
        ... )
        Picture('Logit lens of chosen tokens')
    """
    values = _of_one_prompt(logits)
    if isinstance(chosen, str) or not chosen:
        raise ValueError(
            f"chosen is {chosen!r}; give a list of one or more tokens, such as [' Mary', ' John']"
        )
    columns = token_labels(tokens, values.shape[1])
    layers = _layers(rows, len(values))
    numbers = [model.to_answer_token(text) for text in chosen]
    odds = values.softmax(-1)[..., numbers].permute(2, 0, 1)
    across = max(5.0, min(26.0, 480 / len(columns)))
    return grid(
        odds,
        Axis("after layer", layers, max(8.0, min(18.0, 360 / len(layers)))),
        Axis("token", columns, across),
        sequential(),
        "probability",
        title,
        panels=[visible(text) for text in chosen],
        panels_wide=max(1, int(1000 // (across * len(columns) + 60))),
    )


def _of_one_prompt(logits: Tensor) -> Tensor:
    return of_one_prompt(
        checked(logits, "the logits"), 3, "the logits of a lens are [layer, pos, d_vocab]"
    )


def _layers(rows: Sequence[str] | None, n: int) -> list[str]:
    return ["embed", *map(str, range(n - 1))] if rows is None else names_for(rows, n, "", "rows")


def _cell(texts: Sequence[str], n_pos: int) -> int:
    """Return the width of a cell in pixels: as wide as its words, but narrower if there are many
    cells.
    """
    longest = max(map(wide, texts))
    return max(34, min(8 + 6 * longest, 80 if n_pos <= 10 else 52))


def _cut(text: str, cell: int) -> str:
    """Return the text, truncated to fit into a cell."""
    room = (cell - 4) // 6
    if wide(text) <= room:
        return text
    kept = ""
    for character in text:
        if wide(kept + character) > room - 1:
            break
        kept += character
    return f"{kept}…"
