"""The logit lens: tokens in cells."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
from jaxtyping import Float
from torch import Tensor

from bridge.pictures.grid import Axis, grid
from bridge.pictures.labels import KnowsWords, Vocabulary, lookup, token_labels, visible, wide
from bridge.pictures.picture import Picture, finished, rows_chart
from bridge.pictures.style import colour, colour_bar, ink_on, sequential
from bridge.pictures.values import checked, compact, limit, names_for, of_one_prompt


def logit_lens(
    logits: Float[Tensor, "..."],
    tokens: Sequence[str],
    model: Vocabulary,
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
            tooltip=[
                alt.Tooltip("row:N", title="after layer"),
                alt.Tooltip("column:N", title="at token"),
                *(alt.Tooltip(f"k{i}:N", title=str(i + 1)) for i in range(top)),
            ],
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
    model: KnowsWords,
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
        sequential(limit(odds)), "probability", title, panels=[visible(text) for text in chosen],
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
