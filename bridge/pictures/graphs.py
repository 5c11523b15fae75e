"""Circuits as graphs: who sends what to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import altair as alt
import torch

from bridge.pictures.labels import visible, width_of
from bridge.pictures.layered_graph import GraphLayout, columns_of, layout
from bridge.pictures.picture import Picture
from bridge.pictures.style import colour, configuration, dark_parameter
from bridge.pictures.values import checked, compact

#: From where, to where, and how much: ``("L0H1", "L2H3", 0.7)``.
Edge = tuple[str, str, float]


def circuit(
    edges: Iterable[Edge],
    *,
    columns: Mapping[str, int] | None = None,
    joins: Iterable[tuple[str, str]] = (),
    supports: Literal["positive", "negative"] | None = None,
    measure: str = "score",
    title: str = "Circuit",
) -> Picture:
    """A circuit as a graph, from left to right: a line for each edge, the thicker the larger its score.

    Blue is positive, orange negative, and dotted lines join what belongs together. Hovering over a line says from where
    to where it goes. The slider, in HTML, hides edges with smaller scores, and the nodes that have no others.

    Args:
        edges: for each, the sender's name, the receiver's name and a score.
        columns: which column each node stands in, such as its layer; None: to the right of all that send to it.
        joins: pairs of nodes that belong together, such as a head's input and the head; without a score.
        supports: which scores say that an edge supports a metric, as those of a `Circuit` do; blue is theirs then.
            None: blue is positive.
        measure: what the score is.
        title: over the picture.

    Raises:
        ValueError: no edges, one that is given twice, a score that is not finite, senders and receivers in a circle, or
            columns that do not go from left to right.
        TypeError: an edge that is not two names and a number.

    Example:
        >>> from bridge import pictures
        >>> pictures.circuit([("embed", "L0H1", 0.9), ("L0H1", "L2H3", 0.7), ("L2H3", "logits", -0.4)])
        Picture('Circuit')
    """
    given = list(edges)
    for edge in given:
        if len(edge) != 3 or not isinstance(edge[0], str) or not isinstance(edge[1], str):
            raise TypeError(f"an edge is (sender, receiver, score), such as ('L0H1', 'L2H3', 0.7); one is {edge!r}")
    if not given:
        raise ValueError("there are no edges: the circuit is empty")
    pairs = [(sender, receiver) for sender, receiver, _ in given]
    twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
    if twice:
        raise ValueError(f"the edge from {twice[0]!r} to {twice[1]!r} is given more than once")
    scores = checked(torch.tensor([float(score) for *_, score in given]), "the scores")
    pairs += joins
    found = layout(pairs, columns_of(pairs) if columns is None else columns)
    return _drawn(pairs, [score or 0.0 for score in compact(scores)], found, measure, title, supports)


def _drawn(
    pairs: Sequence[tuple[str, str]],
    scores: Sequence[float],
    found: GraphLayout,
    measure: str,
    title: str,
    supports: Literal["positive", "negative"] | None,
) -> Picture:
    """The graph; of the pairs, those behind the scores are joined without one."""
    box = max(46, width_of([visible(node) for node in found.nodes]))
    gap = max(box + 40, min(150, 760 // found.n_columns))
    half = box / gap / 2
    across = alt.Scale(domain=[-0.5, found.n_columns - 0.5], nice=False)
    down = alt.Scale(domain=[-found.n_rows / 2 - 0.1, found.n_rows / 2 + 0.1], nice=False, reverse=True)
    x, y = alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=down)
    largest = max(map(abs, scores)) or 1.0
    strongest = _strongest(pairs, scores)
    points = [
        {
            "e": e,
            "o": o,
            "x": round(px, 3),
            "y": round(py, 3),
            "v": scores[e] if e < len(scores) else None,
            "m": min(strongest.get(node, 0.0) for node in pairs[e]),
        }
        for e, (sender, _) in enumerate(pairs)
        for o, (px, py) in enumerate(_line(found.nodes[sender], found.paths[e], half))
    ]
    names = [{"e": e, "s": visible(sender), "r": visible(receiver)} for e, (sender, receiver) in enumerate(pairs)]
    joined = (
        alt.Chart(alt.Data(values=[point for point in points if point["v"] is None]))
        .transform_filter("datum.m >= least")
        .mark_line(interpolate="basis", strokeWidth=1.5, strokeDash=[2, 3], color=colour("ink"), opacity=0.6)
        .encode(x=x, y=y, detail="e:N", order="o:Q")
    )
    orange = "datum.v > 0" if supports == "negative" else "datum.v < 0"
    lines = (
        alt.Chart(alt.Data(values=[point for point in points if point["v"] is not None]))
        .transform_lookup("e", from_=alt.LookupData(alt.Data(values=names), "e", ["s", "r"]))
        .transform_calculate(size="abs(datum.v)")
        .transform_filter("datum.size >= least")
        .mark_line(interpolate="basis", opacity=0.85, strokeCap="round")
        .encode(
            x=x,
            y=y,
            detail="e:N",
            order="o:Q",
            color=alt.condition(orange, alt.value(colour("accent")), alt.value(colour("line"))),
            strokeWidth=alt.StrokeWidth("size:Q", scale=alt.Scale(domain=[0, largest], range=[0.8, 9]), legend=None),
            tooltip=[
                alt.Tooltip("s:N", title="from"),
                alt.Tooltip("r:N", title="to"),
                alt.Tooltip("v:Q", title=measure),
            ],
        )
    )
    nodes = [
        {
            "m": strongest.get(node, 0.0),
            "n": visible(node),
            "x": px,
            "y": py,
            "x0": px - half,
            "x1": px + half,
            "y0": py - 0.32,
            "y1": py + 0.32,
        }
        for node, (px, py) in found.nodes.items()
    ]
    base = alt.Chart(alt.Data(values=nodes)).transform_filter("datum.m >= least")
    boxes = base.mark_rect(fill=colour("ground"), stroke=colour("ink"), strokeWidth=1.2, cornerRadius=4).encode(
        x=alt.X("x0:Q", axis=None, scale=across), x2="x1:Q", y=alt.Y("y0:Q", axis=None, scale=down), y2="y1:Q"
    )
    words = base.mark_text(fontSize=11, color=colour("ink"), limit=box - 4).encode(
        x=x, y=y, text="n:N", tooltip=alt.Tooltip("n:N", title="node")
    )
    blue = (
        f"positive {measure}, orange: negative" if supports is None else "the metric falls without it, orange: it rises"
    )
    legend = [f"blue: {blue}; width: {measure}, up to {largest:g}"]
    if len(pairs) > len(scores):
        legend.append("dotted: the inputs of one head; from left to right: the layers")
    chart = (joined + lines + boxes + words).properties(
        title=alt.Title(title, subtitle=legend),
        width=gap * found.n_columns,
        height=max(60, round(44 * (found.n_rows + 0.2))),
        config=configuration(),
    )
    return Picture(chart.add_params(dark_parameter(), _slider(largest)), title)


def _strongest(pairs: Sequence[tuple[str, str]], scores: Sequence[float]) -> dict[str, float]:
    """For each node the largest score, of either sign, of an edge there."""
    found: dict[str, float] = {}
    for pair, score in zip(pairs, scores, strict=False):
        for node in pair:
            found[node] = max(abs(score), found.get(node, 0.0))
    return found


def _slider(largest: float) -> alt.Parameter:
    """What hides edges with smaller scores."""
    ends = alt.binding_range(min=0, max=largest, step=largest / 100, name="hide edges below ")
    return alt.param(name="least", value=0, bind=ends)


def _line(start: tuple[int, float], stops: Sequence[tuple[int, float]], half: float) -> Sequence[tuple[float, float]]:
    """The points that guide a smooth line from a box through all stops: level at each, and straight where it passes."""
    points: list[tuple[float, float]] = []
    column, row = start
    for at, (next_column, next_row) in enumerate(stops):
        left, right = column + half, next_column - half
        middle = (left + right) / 2
        points += [(left, row), (middle, row), (middle, next_row), (right, next_row)]
        if at < len(stops) - 1:
            points.append((next_column + 0.0, next_row))
        column, row = next_column, next_row
    return points
