"""Circuits as graphs: who sends what to whom."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import altair as alt
import torch
from jaxtyping import Float
from torch import Tensor

from bridge.hooks.arguments import check_positive
from bridge.pictures.pictures import Picture, finished, rows_chart
from bridge.pictures.style import (
    checked,
    colour,
    compact,
    configuration,
    dark_parameter,
    lookup,
    sequential,
    token_labels,
    tooltips,
    visible,
    width_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# The lines and boxes of a graph that stands in columns.
# ----------------------------------------------------------------------------------------------------------------------


#: The chosen node, a Vega expression of its number, and whether there is one.
PICKED = "(isValid(picked.i) ? picked.i[0] : null)"
SOME_PICKED = "(isValid(picked.i) && isValid(picked.i[0]))"


@dataclass(frozen=True)
class GraphDrawing:
    """Nodes by their numbers, where they stand, and what joins them.

    Attributes:
        pairs: sender and receiver of each line; those behind the scores are joined without one.
        scores: of the first pairs.
        labels, names: of each node what is written on it, and what tells it from all others.
        places: of each node its column and its row.
        paths: of each pair the stops after its sender.
        bands: tokens, each with the middle of its rows and how many these are.
        negative_supports: blue is negative, and orange positive; otherwise the other way round.
        sizes: how large all that is.
        strongest_path: its nodes.
    """

    pairs: Sequence[tuple[int, int]]
    scores: Sequence[float]
    labels: Sequence[str]
    names: Sequence[str]
    places: Sequence[tuple[int, float]]
    paths: Sequence[Sequence[tuple[int, float]]]
    bands: Sequence[tuple[str, float, float]]
    negative_supports: bool
    sizes: GraphSizes
    strongest_path: Sequence[int]

    @property
    def hue(self) -> Any:
        """The colour of what shows a score ``datum.v``."""
        orange = "datum.v > 0" if self.negative_supports else "datum.v < 0"
        return alt.condition(orange, alt.value(colour("accent")), alt.value(colour("line")))

    def near(self, line: int) -> list[int]:
        """The nodes whose edge a line is: its ends, and what is joined with them."""
        ends = self.pairs[line]
        joined = [pair for pair in self.pairs[len(self.scores) :] if set(pair) & set(ends)]
        return sorted({*ends, *(node for pair in joined for node in pair)})

    def strongest(self, node: int) -> float:
        """The largest score, of either sign, of an edge at a node."""
        return max((abs(v) for v, pair in zip(self.scores, self.pairs, strict=False) if node in pair), default=0.0)

    def drawn(self, measure: str) -> alt.LayerChart | alt.FacetChart:
        """Lines, then boxes, then words.

        Args:
            measure: what a score is.
        """
        sizes = self.sizes
        across = alt.Scale(domain=[0, sizes.width], nice=False)
        down = alt.Scale(domain=[0, sizes.height], nice=False, reverse=True)

        def x(name: str) -> alt.X:
            return alt.X(f"{name}:Q", axis=None, scale=across)

        def y(name: str) -> alt.Y:
            return alt.Y(f"{name}:Q", axis=None, scale=down)

        layers = [self._joined(x("x"), y("y")), self._lines(x("x"), y("y"), measure)]
        base = _inline([self._node(i) for i in range(len(self.labels))]).transform_filter("datum.m >= least")
        picked = alt.selection_point(name="picked", fields=["i"], on="click", toggle=False)
        zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]")
        width = alt.condition(f"{PICKED} === datum.i", alt.value(3), alt.StrokeWidth("w:Q", scale=None))
        layers.append(
            base.mark_rect(fill=colour("ground"), stroke=colour("ink"), cornerRadius=4, cursor="pointer")
            .encode(x=x("x0"), x2="x1:Q", y=y("y0"), y2="y1:Q", strokeWidth=width)
            .add_params(picked, zoom)
        )
        written: dict[str, Any] = {"fontSize": sizes.font, "color": colour("ink")}
        layers.append(
            base.mark_text(limit=sizes.box[0] - 3, cursor="pointer", **written).encode(
                x=x("x"), y=y("y"), text="n:N", tooltip=alt.Tooltip("t:N", title="node")
            )
        )
        if self.bands:
            first = 8 if sizes.down else 0
            places = [(token, *self._at(-1, row)) for token, row, _ in self.bands]
            bands = [
                {"t": t, "x": px if sizes.down else first, "y": first if sizes.down else py} for t, px, py in places
            ]
            room = min(rows for *_, rows in self.bands) * sizes.across if sizes.down else sizes.margin - 4
            align: Literal["left", "center"] = "center" if sizes.down else "left"
            words = _inline(bands).mark_text(align=align, fontStyle="italic", limit=room, **written)
            layers.insert(0, words.encode(x=x("x"), y=y("y"), text="t:N"))
        return alt.layer(*layers).properties(width=round(sizes.width), height=round(sizes.height))

    def _at(self, column: float, row: float) -> tuple[float, float]:
        """A place in pixels."""
        sizes = self.sizes
        along = sizes.margin + (column + 0.5) * sizes.along
        beside = row * sizes.across + (sizes.width if sizes.down else sizes.height) / 2
        return (beside, along) if sizes.down else (along, beside)

    def _node(self, i: int) -> dict[str, Any]:
        (px, py), (wide, high) = self._at(*self.places[i]), self.sizes.box
        corners = {"x0": px - wide / 2, "x1": px + wide / 2, "y0": py - high / 2, "y1": py + high / 2}
        told = {"i": i, "m": self.strongest(i), "n": self.labels[i], "t": self.names[i], "x": px, "y": py}
        told["w"] = 2.2 if i in self.strongest_path else 1.0
        return told | {name: round(value, 1) for name, value in corners.items()}

    def _points(self, lines: Iterable[int]) -> list[dict[str, Any]]:
        sizes = self.sizes
        half = sizes.box[sizes.down] / sizes.along / 2
        found = []
        for e in lines:
            stops = _line(self.places[self.pairs[e][0]], self.paths[e], half)
            least = min(map(self.strongest, self.pairs[e]))
            for o, (px, py) in enumerate(self._at(*stop) for stop in stops):
                found.append({"e": e, "o": o, "x": round(px, 1), "y": round(py, 1), "m": least})
        return found

    def _joined(self, x: alt.X, y: alt.Y) -> alt.Chart:
        return (
            _inline(self._points(range(len(self.scores), len(self.pairs))))
            .transform_filter("datum.m >= least")
            .mark_line(
                interpolate="basis",
                strokeWidth=1.5,
                strokeDash=[2, 3],
                color=colour("ink"),
                strokeOpacity=0.6,
            )
            .encode(x=x, y=y, detail="e:N", order="o:Q")
        )

    def _lines(self, x: alt.X, y: alt.Y, measure: str) -> alt.Chart:
        other = f"{SOME_PICKED} && indexof(datum.near, {PICKED}) < 0"
        largest = max(map(abs, self.scores)) or 1.0
        edges = alt.LookupData(_inline(self.edges()).data, "e", ["s", "r", "v", "near"])
        weakest_first = sorted(range(len(self.scores)), key=lambda e: abs(self.scores[e]))
        weight = alt.StrokeOpacity(
            "size:Q", scale=alt.Scale(type="sqrt", domain=[0, largest], range=[0.3, 0.95]), legend=None
        )
        return (
            _inline(self._points(weakest_first))
            .transform_lookup("e", from_=edges)
            .transform_calculate(size="abs(datum.v)")
            .transform_filter("datum.size >= least")
            .mark_line(interpolate="basis", strokeCap="round")
            .encode(
                x=x,
                y=y,
                detail="e:N",
                order="o:Q",
                color=self.hue,
                strokeOpacity=alt.condition(other, alt.value(0.08), weight),
                strokeWidth=alt.StrokeWidth(
                    "size:Q", scale=alt.Scale(domain=[0, largest], range=[0.6, 0.7 * self.sizes.font]), legend=None
                ),
                tooltip=tooltips({"s:N": "from", "r:N": "to", "v:Q": measure}),
            )
        )

    def edges(self) -> list[dict[str, Any]]:
        """Each edge with its ends' names, its score, and the nodes whose edge it is."""
        return [
            {"e": e, "s": self.names[s], "r": self.names[r], "v": self.scores[e], "near": self.near(e)}
            for e, (s, r) in enumerate(self.pairs[: len(self.scores)])
        ]

    @property
    def opens_at(self) -> list[float]:
        """Where the largest edge of the strongest path is, as shares of width and height."""
        on_path = [e for e, pair in enumerate(self.pairs[: len(self.scores)]) if {*pair} <= {*self.strongest_path}]
        every = range(len(self.scores))  # where the path has none but joined ends
        ends = self.pairs[max(on_path or every, key=lambda e: abs(self.scores[e]))]
        (x, y), (there, below) = (self._at(*self.places[end]) for end in ends)
        return [(x + there) / 2 / self.sizes.width, (y + below) / 2 / self.sizes.height]


def _inline(rows: list[Any]) -> alt.Chart:
    """A chart of rows of values that Altair need not look at one by one: they are one text."""
    said = json.dumps(rows, separators=(",", ":"))
    return alt.Chart(alt.InlineData(values=said, format=alt.DataFormat(type="json")))


def strongest_path(pairs: Sequence[tuple[int, int]], scores: Sequence[float], order: Sequence[int]) -> list[int]:
    """The way from where nothing is received to where nothing is sent whose weakest edge is the strongest.

    Args:
        pairs: sender and receiver; those behind the scores are joined, as strong as any.
        scores: of the first pairs.
        order: the nodes, each behind all that send to it.

    Example:
        >>> from bridge.pictures.graphs import strongest_path
        >>> strongest_path([(0, 1), (1, 3), (0, 2), (2, 3)], [5.0, 0.1, 1.0, -2.0], [0, 1, 2, 3])
        [0, 2, 3]
    """
    arriving: dict[int, list[tuple[float, int]]] = {}
    for at, (sender, receiver) in enumerate(pairs):
        arriving.setdefault(receiver, []).append((abs(scores[at]) if at < len(scores) else float("inf"), sender))
    best: dict[int, tuple[float, float, list[int]]] = {}
    for node in order:
        ways = [
            (min(size, best[sender][0]), min(size, 1e300) + best[sender][1], [*best[sender][2], node])
            for size, sender in arriving.get(node, ())
        ]
        best[node] = max(ways, default=(float("inf"), 0.0, [node]), key=lambda way: way[:2])
    sending = {sender for sender, _ in pairs}
    return max((best[node] for node in order if node not in sending), key=lambda way: way[:2])[2]


@dataclass(frozen=True)
class GraphSizes:
    """How large a graph is drawn, in pixels.

    Attributes:
        down: columns are lines, one under the other, and rows go across.
        along: from one column to the next.
        across: from one row to the next.
        box: a node's width and height.
        font: of what is written on nodes.
        margin: what is left free before the first column, for tokens.
        width, height: of the whole.
    """

    down: bool
    along: float
    across: float
    box: tuple[float, float]
    font: int
    margin: float
    width: float
    height: float


#: A graph that would be wider from left to right goes from top to bottom, as wide as a page.
_WIDEST, _PAGE = 1500, 720
#: What is left free around a picture.
_AROUND = 10
#: Of what is written on nodes, at least.
_SMALLEST_FONT = 7


def fitted(
    edges: Sequence[tuple[str, str]],
    columns: Mapping[str, int],
    bands: Mapping[str, int] | None,
    labels: Sequence[str],
    tokens: Sequence[str],
    width: int | None,
) -> tuple[GraphLayout, GraphSizes]:
    """Where nodes and lines stand, and how large they are: from left to right; where it is narrow, from top to bottom.

    Args:
        edges, columns, bands: as for `layout`.
        labels: what is written on nodes.
        tokens: what is written at bands.
        width: how wide it may be; None: as it needs, up to a page from top to bottom.

    Raises:
        ValueError: as `layout`; the width is too small for what is written on nodes.
    """
    box, beside = max(46, width_of(labels)), width_of(tokens) + 6 if tokens else 0
    flat = layout(edges, columns, bands)
    if width is None and beside + flat.n_columns * (box + 14) > _WIDEST - _AROUND:
        width = _PAGE
    for font in range(11, _SMALLEST_FONT - 1, -1):  # fewer nodes in a line first, then smaller letters
        small, margin = box * font / 11, beside * font / 11
        gap = float(max(box + 40, min(150, 760 // flat.n_columns)))
        inside = (_WIDEST if width is None else width) - _AROUND
        gap = min(gap, (inside - margin) / flat.n_columns)
        if gap >= small + 10:
            high, whole = 4 * font * (flat.n_rows + 0.2), margin + gap * flat.n_columns
            return flat, GraphSizes(False, gap, 4 * font, (small, 2.5 * font), font, margin, whole, max(60, high))
        assert width is not None
        rows = (inside - _AROUND) / (small + 6)  # lines at the edge have a width of their own
        deep = layout(edges, columns, bands, room=rows)
        if deep.n_rows <= rows:
            along, margin = 2 * font + 12, 22 if tokens else 0
            across = min((inside - _AROUND) / deep.n_rows, 1.5 * small + 9)
            whole = margin + along * deep.n_columns
            return deep, GraphSizes(True, along, across, (small, 2 * font - 2), font, margin, inside, whole)
    least = min(deep.n_rows * (small + 6) + 2 * _AROUND, margin + (small + 10) * flat.n_columns + _AROUND)
    raise ValueError(f"width is {width}; what is written on these nodes needs {math.ceil(least)} or more")


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


# ----------------------------------------------------------------------------------------------------------------------
# Where the nodes and lines of a graph without circles stand when everything flows from left to right.
#
# The layered drawing of Sugiyama et al. 1981, "Methods for Visual Understanding of Hierarchical System Structures":
# nodes in columns, a place of its own for every line in each column that it passes, and orders in which few lines
# cross.
# ----------------------------------------------------------------------------------------------------------------------


#: A node, or where an edge passes a column: the edge's number and the column.
_Stop = str | tuple[int, int]
#: The stops of an edge, each with its column.
_Chain = list[tuple[int, _Stop]]

_BETWEEN_BANDS = 0.3


@dataclass(frozen=True)
class GraphLayout:
    """Places in columns and rows; rows are counted from the middle.

    Attributes:
        nodes: for each node its column and row.
        paths: for each edge the stops after its sender, its receiver the last, as columns and rows.
        n_columns, n_rows: how large it is.
        bands: for each band its middle row and its height.
    """

    nodes: dict[str, tuple[int, float]]
    paths: list[list[tuple[int, float]]]
    n_columns: int
    n_rows: float
    bands: dict[int, tuple[float, float]]


def columns_of(edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """A column for each node, to the right of all that send to it, and no further left than it has to be.

    Args:
        edges: sender and receiver of each.

    Raises:
        ValueError: the edges go in a circle.

    Example:
        >>> from bridge.pictures.graphs import columns_of
        >>> columns_of([("a", "b"), ("b", "c"), ("a", "c"), ("late", "c")])["late"]
        1
    """
    senders: dict[str, list[str]] = {}
    receivers: dict[str, list[str]] = {}
    for sender, receiver in edges:
        senders.setdefault(receiver, []).append(sender)
        senders.setdefault(sender, [])
        receivers.setdefault(sender, []).append(receiver)
    try:
        order = list(TopologicalSorter(senders).static_order())
    except CycleError as error:
        raise ValueError(f"the edges go in a circle: {' -> '.join(error.args[1])}") from error
    column: dict[str, int] = {}
    for node in order:
        column[node] = max((column[sender] + 1 for sender in senders[node]), default=0)
    for node in order:  # what nothing sends to stands just before the first that it sends to
        if not senders[node]:
            column[node] = min(column[receiver] for receiver in receivers[node]) - 1
    return column


def layout(
    edges: Sequence[tuple[str, str]],
    columns: Mapping[str, int],
    bands: Mapping[str, int] | None = None,
    room: float | None = None,
) -> GraphLayout:
    """Rows for the nodes, and the stops of each edge.

    Args:
        edges: sender and receiver of each.
        columns: the column of each node.
        bands: the band of each node: bands lie one under the other, in the order of their numbers; None: all in one.
        room: how many rows there may be, if that can be: a column with more nodes becomes several. None: any number.

    Raises:
        ValueError: a node without a column or a band, or a receiver that does not stand to the right of its sender.

    Example:
        >>> from bridge.pictures.graphs import columns_of, layout
        >>> edges = [("a", "b"), ("b", "c"), ("a", "c")]
        >>> layout(edges, columns_of(edges)).nodes["b"][0]
        1
    """
    for edge in edges:
        _check(edge, columns, bands)
    nodes = dict.fromkeys(name for edge in edges for name in edge)
    own: dict[_Stop, int] = {node: 0 if bands is None else bands[node] for node in nodes}
    used = sorted(set(own.values()))
    together: dict[tuple[int, int], list[str]] = {}
    for node in nodes:
        together.setdefault((columns[node], own[node]), []).append(node)
    for most in range(max(map(len, together.values())), 0, -1):
        parts = {node: (at[0], i // most) for at, there in together.items() for i, node in enumerate(there)}
        index = {part: i for i, part in enumerate(sorted(set(parts.values())))}  # columns without a node take no room
        chains = [_chain(i, edge, {node: index[parts[node]] for node in edge}) for i, edge in enumerate(edges)]
        band = own.copy()
        for chain in chains:
            band |= _bands_between(chain, band, used)
        members: dict[int, list[_Stop]] = {i: [] for i in range(len(index))}
        for column, stop in [(index[parts[node]], node) for node in nodes] + [p for c in chains for p in c[1:-1]]:
            members[column].append(stop)
        high = _heights(members, band, room is not None)
        heights = {
            each: max(sum(high[stop] for stop in stops if band[stop] == each) for stops in members.values())
            for each in used
        }
        total = sum(heights.values()) + _BETWEEN_BANDS * (len(used) - 1)
        if room is None or total <= room:
            break
    starts = itertools.accumulate((heights[each] + _BETWEEN_BANDS for each in used), initial=0.0)
    middle = {each: start + heights[each] / 2 - total / 2 for each, start in zip(used, starts, strict=False)}
    row = _ordered(members, chains, lambda stops: _rows(stops, band, middle, high))
    return GraphLayout(
        nodes={stop: (c, row[stop]) for c, stops in members.items() for stop in stops if isinstance(stop, str)},
        paths=[[(c, row[stop]) for c, stop in chain[1:]] for chain in chains],
        n_columns=len(index),
        n_rows=total,
        bands={each: (middle[each], heights[each]) for each in used},
    )


def _chain(number: int, edge: tuple[str, str], column: Mapping[str, int]) -> _Chain:
    """The stops of an edge from its sender to its receiver, with their columns."""
    sender, receiver = edge
    between = range(column[sender] + 1, column[receiver])
    return [(column[sender], sender), *((at, (number, at)) for at in between), (column[receiver], receiver)]


def _bands_between(chain: _Chain, band: Mapping[_Stop, int], used: list[int]) -> dict[_Stop, int]:
    """The bands of the stops of an edge: on a straight line from its sender's to its receiver's."""
    (start, sender), *between, (end, receiver) = chain
    first, last = used.index(band[sender]), used.index(band[receiver])
    return {stop: used[round(first + (at - start) / (end - start) * (last - first))] for at, stop in between}


def _ordered(
    members: dict[int, list[_Stop]],
    chains: Sequence[_Chain],
    rows: Callable[[Sequence[_Stop]], dict[_Stop, float]],
) -> dict[_Stop, float]:
    """Sorts each column by where its stops' neighbours are, to and fro, so that few lines cross.

    Args:
        members: the stops of each column, which are sorted.
        chains: those of each edge.
        rows: the rows of a column's stops.
    """
    near: dict[_Stop, list[_Stop]] = {}
    for (_, one), (_, other) in itertools.chain.from_iterable(map(itertools.pairwise, chains)):
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    row: dict[_Stop, float] = {}
    for stops in members.values():
        row |= rows(stops)
    for sweep in range(12):
        for column in sorted(members, reverse=bool(sweep % 2)):
            members[column].sort(key=lambda stop: sum(row[other] for other in near[stop]) / len(near[stop]))
            row |= rows(members[column])
    return row


def _check(edge: tuple[str, str], columns: Mapping[str, int], bands: Mapping[str, int] | None) -> None:
    """Refuses an edge whose ends have no place, or that does not go to the right.

    Raises:
        ValueError: it does not.
    """
    for node in edge:
        if node not in columns:
            raise ValueError(f"{node!r} has no column; there are columns for {', '.join(map(repr, columns))}")
        if bands is not None and node not in bands:
            raise ValueError(f"{node!r} has no band, and others have one")
    sender, receiver = edge
    if columns[sender] >= columns[receiver]:
        raise ValueError(
            f"{receiver!r} (column {columns[receiver]}) must stand to the right of {sender!r} "
            f"(column {columns[sender]}), which sends to it"
        )


def _heights(members: Mapping[int, list[_Stop]], band: Mapping[_Stop, int], narrow: bool) -> dict[_Stop, float]:
    """A line that passes takes less room than a node, and many lines next to each other no more than some nodes."""
    line, all_lines = (0.15, 1.2) if narrow else (0.4, 3.0)
    high: dict[_Stop, float] = {}
    for stops in members.values():
        passing = Counter(band[stop] for stop in stops if not isinstance(stop, str))
        for stop in stops:
            high[stop] = 1.0 if isinstance(stop, str) else min(line, all_lines / passing[band[stop]])
    return high


def _rows(
    stops: Sequence[_Stop], band: Mapping[_Stop, int], middle: Mapping[int, float], high: Mapping[_Stop, float]
) -> dict[_Stop, float]:
    """The stops of a column, those of a band one under the other around its middle."""
    rows = {}
    for each in middle:
        there = [stop for stop in stops if band[stop] == each]
        at = middle[each] - sum(high[stop] for stop in there) / 2
        for stop in there:
            rows[stop] = at + high[stop] / 2
            at += high[stop]
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# What a click on a node of a graph shows: its edges, its direct effect, what it attends to.
# ----------------------------------------------------------------------------------------------------------------------


#: Of more edges the largest are shown.
MOST_EDGES = 18


def details(
    graph: GraphDrawing,
    effects: Mapping[int, float],
    patterns: Mapping[int, Tensor],
    words: Sequence[str],
    metric: str,
    measure: str,
) -> alt.VConcatChart:
    """A line about the chosen node, and below it bars of its edges and its pattern; at first, of the strongest node.

    Args:
        graph: the graph.
        effects: direct effects on the metric, by node.
        patterns: ``[query, key]``, by node.
        words: the tokens.
        metric, measure: what effects and scores are.
    """
    first = max(
        patterns or range(len(graph.labels)), key=lambda node: (abs(effects.get(node, 0)), graph.strongest(node))
    )
    shown = f"({SOME_PICKED} ? {PICKED} : {first})"
    below = [_bars(graph, shown, measure), *([_pattern(patterns, words, shown)] if patterns else [])]
    return alt.vconcat(_sentence(graph, effects, shown, metric), alt.hconcat(*below, spacing=30), spacing=6)


def _sentence(
    graph: GraphDrawing, effects: Mapping[int, float], shown: str, metric: str
) -> alt.LayerChart | alt.FacetChart:
    said = []
    for i, label in enumerate(graph.names):
        effect = f"; direct effect: without what it sends to the logits, the {metric} changes by"
        said.append({"i": i, "t": f"{label}{effect} {effects[i]:+.3g}" if i in effects else label})
    base = rows_chart(said, width=600, height=34).transform_filter(f"datum.i === {shown}")
    return alt.layer(
        base.mark_text(align="left", x=0, y=8, fontSize=11, color=colour("ink")).encode(
            text=alt.value(
                "Click a node to see its edges here; Ctrl and the mouse wheel zoom the graph, dragging moves it:"
            )
        ),
        base.mark_text(align="left", x=0, y=26, fontSize=12, fontWeight=600, color=colour("ink")).encode(text="t:N"),
    )


def _bars(graph: GraphDrawing, shown: str, measure: str) -> alt.LayerChart | alt.FacetChart:
    room = max(sum(node in graph.near(e) for e in range(len(graph.scores))) for node in range(len(graph.labels)))
    rows = list(range(1, min(room, MOST_EDGES) + 1))
    wide = width_of(graph.names) * 2 + 10
    scale = alt.Scale(domain=[min(0, *graph.scores), max(0, *graph.scores)], range=[wide, wide + 200])
    base = (
        rows_chart(graph.edges())
        .transform_filter(f"indexof(datum.near, {shown}) >= 0 && abs(datum.v) >= least")
        .transform_calculate(edge="datum.s + ' to ' + datum.r", size="abs(datum.v)")
        .transform_window(rank="row_number()", sort=[alt.SortField("size", order="descending")])
        .transform_filter(f"datum.rank <= {MOST_EDGES}")
        .encode(
            y=alt.Y("rank:O", axis=None, scale=alt.Scale(domain=rows)),
            tooltip=tooltips({"edge:N": "edge", "v:Q": measure}),
        )
    )
    bars = base.mark_bar().encode(x=alt.X("v:Q", axis=None, scale=scale), color=graph.hue)
    names = base.mark_text(align="left", fontSize=11, color=colour("ink")).encode(x=alt.value(0), text="edge:N")
    numbers = base.mark_text(align="left", fontSize=11, color=colour("ink")).encode(x=alt.value(wide + 206), text="v:Q")
    return alt.layer(bars, names, numbers).properties(width=wide + 250, height=18 * len(rows))


def _pattern(patterns: Mapping[int, Tensor], words: Sequence[str], shown: str) -> alt.LayerChart | alt.FacetChart:
    n = len(words)
    rows = [{"i": i, "w": compact(table)} for i, table in patterns.items()]
    cell = max(5.0, min(18.0, 320 / n))
    places = alt.Scale(domain=list(range(n)))
    masked = not any(bool(table.triu(1).any()) for table in patterns.values())  # what the mask forbids stays blank
    labels: dict[str, Any] = {
        "ticks": False,
        "domain": False,
        "labelOverlap": True,
        "labelExpr": lookup(words, "datum.value"),
    }
    blank = (
        rows_chart([{"t": "no head, so no pattern"}])
        .transform_filter(f"indexof({list(patterns)}, {shown}) < 0")
        .mark_text(align="left", x=8, y=14, fontSize=11, color=colour("ink"))
        .encode(text="t:N")
    )
    cells = (
        rows_chart(rows)
        .transform_filter(f"datum.i === {shown}")
        .transform_flatten(["w"])
        .transform_window(n="row_number()")
        .transform_calculate(r=f"floor((datum.n - 1) / {n})", c=f"(datum.n - 1) % {n}")
        .transform_filter("datum.c <= datum.r" if masked else "true")
        .transform_calculate(query=lookup(words, "datum.r"), key=lookup(words, "datum.c"))
        .mark_rect(stroke=colour("ground"), strokeWidth=0.5)
        .encode(
            y=alt.Y("r:O", title="query", scale=places, axis=alt.Axis(**labels)),
            x=alt.X("c:O", title="key", scale=places, axis=alt.Axis(labelAngle=-90, **labels)),
            color=alt.Color("w:Q", scale=sequential(), legend=None),
            tooltip=tooltips({"query:N": "query", "key:N": "key", "w:Q": "weight"}),
        )
    )
    return alt.layer(cells, blank).properties(width=round(cell * n), height=round(cell * n))


#: From where, to where, and how much: ``("L0H1", "L2H3", 0.7)``.
Edge = tuple[str, str, float]


@dataclass(frozen=True, eq=False)
class CircuitNode:
    """How a circuit's picture draws one of its nodes: where, with which words, how strong.

    Attributes:
        column: where it stands from left to right, such as its layer; None: to the right of all that send to it.
        label: what is written on it; None: its name.
        position: the position of the token that it stands at; None: at all of them.
        effect: its direct effect on the metric.
        pattern: what a head attends to, ``[query, key]``.

    Example:
        >>> from bridge import pictures
        >>> pictures.CircuitNode(column=3, effect=-0.5).column
        3
    """

    column: int | None = None
    label: str | None = None
    position: int | None = None
    effect: float | None = None
    pattern: Float[Tensor, "query key"] | None = None


def circuit(
    edges: Iterable[Edge],
    *,
    nodes: Mapping[str, CircuitNode] | None = None,
    tokens: Sequence[str] | None = None,
    joins: Iterable[tuple[str, str]] = (),
    supports: Literal["positive", "negative"] | None = None,
    metric: str = "metric",
    measure: str = "score",
    title: str = "Circuit",
    width: int | None = None,
) -> Picture:
    """A circuit as a graph, from left to right: a line for each edge, the thicker the larger its score.

    Where that has no room, it goes from top to bottom. Blue is positive, orange negative, dotted lines join what
    belongs together, and thick boxes are the path whose weakest edge is the strongest. Hovering over a line says from
    where to where it goes. In HTML, a slider hides edges with smaller scores, and the nodes that have no others; a
    click on a node shows its edges, its direct effect and what it attends to; with Ctrl, the mouse wheel zooms.

    Args:
        edges: for each, the sender's name, the receiver's name and a score.
        nodes: what is known of the nodes, by name. Either all have a column, or none; and so with positions.
        tokens: the text of each position, for nodes that have one, and for patterns: ``bridge.to_str_tokens(prompt)``.
        joins: pairs of nodes that belong together, such as a head's input and the head; without a score.
        supports: which scores say that an edge supports the metric, as those of a `Circuit` do; blue is theirs then.
            None: blue is positive.
        metric: what the scores are about, such as ``"logit difference"``.
        measure: what a score is.
        title: over the picture.
        width: in pixels: 720 is a page, 340 a paper's column. None: as wide as it needs, up to 1,500, or else a page.

    Raises:
        ValueError: no edges, one that is given twice, a score that is not finite, senders and receivers in a circle,
            columns that do not go from left to right, a node of `nodes` that has no edge, no tokens for positions, or
            a width that is too small for what is written on the nodes.
        TypeError: an edge that is not two names and a number.

    Example:
        >>> from bridge import pictures
        >>> pictures.circuit([("embed", "L0H1", 0.9), ("L0H1", "L2H3", 0.7), ("L2H3", "logits", -0.4)])
        Picture('Circuit')
    """
    given = list(edges)
    pairs = _ends_of(given)
    scores = checked(torch.tensor([float(score) for *_, score in given]), "the scores")
    pairs += joins
    known = dict(nodes or {})
    words = [] if tokens is None else token_labels(tokens, len(tokens))
    _check_nodes(known, {name for pair in pairs for name in pair}, len(words))
    columns = {name: node.column for name, node in known.items() if node.column is not None}
    positions = {name: node.position for name, node in known.items() if node.position is not None}
    if width is not None:
        check_positive("width", width)
    strengths = [score or 0.0 for score in compact(scores)]
    largest = max(map(abs, strengths)) or 1.0
    label = {name: known.get(name, CircuitNode()).label or visible(name) for pair in pairs for name in pair}
    shown = [words[at] for at in sorted(set(positions.values()))]
    found, sizes = fitted(pairs, columns or columns_of(pairs), positions or None, [*label.values()], shown, width)
    names, places = [*found.nodes], [*found.nodes.values()]
    labels = [label[name] for name in names]
    numbers = [(names.index(sender), names.index(receiver)) for sender, receiver in pairs]
    order = sorted(range(len(names)), key=lambda at: places[at][0])
    graph = GraphDrawing(
        pairs=numbers,
        scores=strengths,
        labels=labels,
        names=[
            f"{label} [{positions[name]}]" if name in positions else label
            for name, label in zip(names, labels, strict=True)
        ],
        places=places,
        paths=found.paths,
        bands=[(words[at], *place) for at, place in found.bands.items()] if positions else [],
        negative_supports=supports == "negative",
        sizes=sizes,
        strongest_path=strongest_path(numbers, strengths, order),
    )
    said = f"blue: positive {measure}, orange: negative"
    if supports is not None:
        said = f"blue: the {metric} falls without it, orange: it rises"
    legend = [f"{said}; width: {measure}, up to {largest:g}; thick boxes: the strongest path"]
    if len(pairs) > len(given):
        way = "top to bottom" if sizes.down else "left to right"
        legend.append(f"dotted: the inputs of one head; from {way}: the layers")
    letters = max(20, round(sizes.width / 6.2))
    heading = alt.Title(
        textwrap.wrap(title, round(letters * 0.7)),
        subtitle=[line for some in legend for line in textwrap.wrap(some, letters)],
    )
    drawn = graph.drawn(measure).properties(title=heading)
    effects = {names.index(name): node.effect for name, node in known.items() if node.effect is not None}
    patterns = {
        names.index(name): checked(node.pattern, "a pattern")
        for name, node in known.items()
        if node.pattern is not None
    }
    below = details(graph, effects, patterns, words, metric, measure)
    usermeta = {"details": True, "open": [round(share, 3) for share in graph.opens_at]}
    chart = alt.vconcat(drawn, below, spacing=14).properties(config=configuration(), usermeta=usermeta)
    ends = alt.binding_range(min=0, max=largest, step=largest / 100, name="hide edges below ")
    return Picture(chart.add_params(dark_parameter(), alt.param(name="least", value=0, bind=ends)), title)


def _ends_of(edges: list[tuple[str, str, float]]) -> list[tuple[str, str]]:
    """Sender and receiver of each edge.

    Raises:
        ValueError: there are no edges, or one is given twice.
        TypeError: one is not two names and a number.
    """
    for edge in edges:
        if len(edge) != 3 or not isinstance(edge[0], str) or not isinstance(edge[1], str):
            raise TypeError(f"an edge is (sender, receiver, score), such as ('L0H1', 'L2H3', 0.7); one is {edge!r}")
    if not edges:
        raise ValueError("there are no edges: the circuit is empty")
    pairs = [(sender, receiver) for sender, receiver, _ in edges]
    if twice := [pair for pair in pairs if pairs.count(pair) > 1]:
        raise ValueError(f"the edge from {twice[0][0]!r} to {twice[0][1]!r} is given more than once")
    return pairs


def _check_nodes(nodes: Mapping[str, CircuitNode], ends: set[str], n_tokens: int) -> None:
    """Refuses nodes without an edge, and those that do not fit the tokens.

    Raises:
        ValueError: there is one.
    """
    for name, node in nodes.items():
        if name not in ends:
            raise ValueError(f"{name!r} is one of the nodes, and no edge begins or ends there")
        if node.position is not None and not 0 <= node.position < n_tokens:
            raise ValueError(
                f"{name!r} is at position {node.position}, and there are {n_tokens} tokens: tokens must hold the text "
                "of each position"
            )
        if node.pattern is not None and list(node.pattern.shape) != [n_tokens] * 2:
            raise ValueError(f"a pattern has shape {list(node.pattern.shape)}, and there are {n_tokens} tokens")


# ----------------------------------------------------------------------------------------------------------------------
# How faithful circuits of growing size are.
# ----------------------------------------------------------------------------------------------------------------------


def faithfulness(
    shares: Sequence[float],
    values: Mapping[str, Sequence[float]],
    intervals: Mapping[str, Float[Tensor, "share 2"]] | None = None,
    *,
    title: str = "Faithfulness of circuits",
) -> Picture:
    """The faithfulness of circuits against their size: a line for each way to choose edges, a band for its interval.

    Args:
        shares: the circuits' parts of all edges.
        values: for each way the faithfulness of the circuit of each size, such as `Curve.faithfulness`.
        intervals: for some of them the lower and upper end, such as ``Curve.intervals()["faithfulness"]``.
        title: over the picture.

    Raises:
        ValueError: nothing to draw, other numbers than there are sizes, intervals of a way without values, a value that
            is not finite.

    Example:
        >>> from bridge import pictures
        >>> pictures.faithfulness([0.01, 0.1, 1.0], {"EAP": [0.2, 0.8, 1.0], "EAP-IG": [0.4, 0.9, 1.0]})
        Picture('Faithfulness of circuits')
    """
    bands = dict(intervals or {})
    if not values or bands.keys() - values.keys():
        raise ValueError(f"there are values of {', '.join(values) or 'nothing'}, and intervals of {', '.join(bands)}")
    rows = []
    for name, line in values.items():
        band = bands.get(name)
        if len(line) != len(shares) or (band is not None and list(band.shape) != [len(shares), 2]):
            given = "" if band is None else f", with intervals {list(band.shape)}"
            raise ValueError(f"{name} has {len(line)} values{given}, and there are {len(shares)} sizes")
        numbers = torch.cat(
            [torch.tensor(line)[:, None], (torch.tensor([line, line]).T if band is None else band.cpu())], 1
        )
        for share, (value, low, high) in zip(shares, checked(numbers, name).tolist(), strict=True):
            rows.append({"s": share, "n": visible(name), "v": value, "low": low, "high": high})
    across = alt.Scale(type="log" if min(shares) > 0 else "symlog")
    base = rows_chart(rows).encode(
        x=alt.X(
            "s:Q",
            title="share of all edges",
            scale=across,
            axis=alt.Axis(format="~%", values=list(shares), labelOverlap="greedy"),
        ),
        color=alt.Color(
            "n:N", title=None, scale=alt.Scale(scheme="tableau10"), legend=alt.Legend(orient="bottom", symbolOpacity=1)
        ),
    )
    value = alt.Y("v:Q", title="faithfulness")
    tooltip = tooltips({"n:N": "scores"}) + tooltips({"s:Q": "share of edges"}, "~%")
    tooltip += tooltips({"v:Q": "faithfulness", "low:Q": "from", "high:Q": "to"}, ".3f")
    drawn = base.mark_line(strokeWidth=2).encode(y=value) + base.mark_circle(size=40).encode(y=value, tooltip=tooltip)
    whole = rows_chart([{"one": 1}]).mark_rule(strokeDash=[4, 4], color=colour("ink"), opacity=0.6).encode(y="one:Q")
    told = "1, dashed: the circuit does what the model does"
    if bands:
        drawn = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title="faithfulness"), y2="high:Q") + drawn
        told += "; bands: intervals over prompts"
    return finished(whole + drawn, alt.Title(title, subtitle=told), width=460, height=280)
