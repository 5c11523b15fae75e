"""Circuits as graphs: nodes and the edges between them."""

from __future__ import annotations

import itertools
import json
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import altair as alt
import torch
from jaxtyping import Float
from torch import Tensor

from bridge.arguments import check_positive
from bridge.pictures.heat_maps import Axis, cells, column_axis, row_axis
from bridge.pictures.pictures import Picture, finished, rows_chart
from bridge.pictures.results import draws_results
from bridge.pictures.style import (
    checked,
    colour,
    compact,
    orange_if,
    sequential,
    token_labels,
    tooltips,
    visible,
    width_of,
)

# --------------------------------------------------------------------------------------------------
# Layout of the nodes and lines of an acyclic graph that flows from top to bottom.
#
# The layered drawing of Sugiyama et al. 1981, "Methods for Visual Understanding of Hierarchical
# System Structures": nodes in levels, a place of its own for every line in each level that it
# passes, and orders in which few lines cross.
# --------------------------------------------------------------------------------------------------


# Sizes in pixels.
_BOX_HEIGHT = 20
_LEVEL = 40
#: The space beside a node, and beside a band.
_GAP = 10
_BAND_GAP = 6
#: The width of a passing line, and of all lines that pass a band.
_LINE = 10
_ALL_LINES = 72
#: The margins around a picture.
_AROUND = 20
#: The largest width of a token.
_TOKEN = 70

#: The sender and receiver of each edge.
Pairs = Sequence[tuple[str, str]]


@dataclass(eq=False)
class _GraphStop:
    """A place in a level: that of a node, or of a line that passes the level.

    Attributes:
        level: the level's number, from top to bottom.
        band: the band's number, from left to right.
        width: the width in pixels.
        x: the middle in pixels.
        neighbours: the stops before and after it on its lines.
    """

    level: int
    band: int
    width: float
    x: float = 0.0
    neighbours: list[_GraphStop] = field(default_factory=list)


class GraphLayout:
    """A layout of nodes and edges in levels.

    Args:
        edges: sender and receiver of each.
        levels: the level of each node; levels without a node take no room.
        bands: the band of each node: bands are side by side in the order of their numbers; None: a
            single band.
        box: the width of a node in pixels.

    Attributes:
        box: the width of a node in pixels.
        nodes: the place of each node.
        paths: for each edge its stops, from its sender to its receiver.
        levels: the stops of each level.
        bands: the numbers of the bands; empty: a single band.
        middles: the middle of each band in pixels.
        width: the width of the graph in pixels.

    Raises:
        ValueError: a node without a level or a band, or a receiver that is not below its sender.

    Example:
        >>> from bridge.pictures.graphs import GraphLayout, levels_of
        >>> edges = [("a", "b"), ("b", "c"), ("a", "c")]
        >>> GraphLayout(edges, levels_of(edges)).nodes["b"].level
        1
    """

    def __init__(
        self,
        edges: Pairs,
        levels: Mapping[str, int],
        bands: Mapping[str, int] | None = None,
        box: int = 46,
    ) -> None:
        names = list(dict.fromkeys(itertools.chain.from_iterable(edges)))
        level = _numbered(names, levels, "column")
        band = _numbered(names, bands or dict.fromkeys(names, 0), "band")
        self.bands = sorted(set(bands.values())) if bands else []
        self.box = box
        self.nodes = {name: _GraphStop(level[name], band[name], box + _GAP) for name in names}
        self.paths = [self._path(*edge) for edge in edges]
        self.levels: list[list[_GraphStop]] = [[] for _ in set(level.values())]
        for stop in [*self.nodes.values(), *self._passing()]:
            self.levels[stop.level].append(stop)
        self.middles: list[float] = []
        self.width = 0.0
        for number in sorted(set(band.values())):
            widest = max(_width(stops, number) for stops in self.levels) + _BAND_GAP
            self.middles.append(self.width + widest / 2)
            self.width += widest
        self._order()

    def _path(self, sender: str, receiver: str) -> list[_GraphStop]:
        """Return an edge's stops: one in each level, on a straight line between the bands of its
        ends.

        Raises:
            ValueError: the receiver is not below the sender.
        """
        start = self.nodes[sender]
        end = self.nodes[receiver]
        n_levels = end.level - start.level
        if n_levels <= 0:
            raise ValueError(
                f"{receiver!r} must have a larger column than {sender!r}, which sends to it"
            )
        path = [start]
        n_bands = end.band - start.band
        for i in range(1, n_levels):
            band = start.band + round(i / n_levels * n_bands)
            stop = _GraphStop(start.level + i, band, _LINE)
            path.append(stop)
        path.append(end)
        for stop, below in itertools.pairwise(path):
            stop.neighbours.append(below)
            below.neighbours.append(stop)
        return path

    def _passing(self) -> list[_GraphStop]:
        """Return the stops of passing lines, which are narrower where many pass."""
        passing = []
        for path in self.paths:
            passing += path[1:-1]
        crowds = Counter((stop.level, stop.band) for stop in passing)
        for stop in passing:
            crowd = crowds[stop.level, stop.band]
            stop.width = min(_LINE, _ALL_LINES / crowd)
        return passing

    def _order(self) -> None:
        """Sort each level by its stops' neighbours, down and up again, so that few lines cross."""
        for stops in self.levels:
            self._set_places(stops)
        for _ in range(6):
            for stops in [*self.levels, *reversed(self.levels)]:
                stops.sort(key=_middle_of_neighbours)
                self._set_places(stops)

    def _set_places(self, stops: Sequence[_GraphStop]) -> None:
        """Place the stops of a level side by side, around the middles of their bands."""
        for band, middle in enumerate(self.middles):
            right = middle - _width(stops, band) / 2
            for stop in stops:
                if stop.band == band:
                    stop.x = right + stop.width / 2
                    right += stop.width


def _numbered(names: Sequence[str], values: Mapping[str, int], what: str) -> dict[str, int]:
    """Return the values as numbers from 0 without gaps.

    Raises:
        ValueError: a name without a value.
    """
    for name in names:
        if name not in values:
            raise ValueError(f"{name!r} has no {what}, and others have one")
    used = sorted({values[name] for name in names})
    return {name: used.index(values[name]) for name in names}


def _width(stops: Sequence[_GraphStop], band: int) -> float:
    """Return the width of a band's stops in a level."""
    return sum(stop.width for stop in stops if stop.band == band)


def _middle_of_neighbours(stop: _GraphStop) -> float:
    return statistics.fmean(neighbour.x for neighbour in stop.neighbours)


def levels_of(edges: Pairs) -> dict[str, int]:
    """Return a level for each node: directly below its lowest sender, or above its first receiver.

    Args:
        edges: sender and receiver of each.

    Raises:
        ValueError: the edges form a cycle.

    Example:
        >>> from bridge.pictures.graphs import levels_of
        >>> levels_of([("a", "b"), ("b", "c"), ("a", "c"), ("late", "c")])["late"]
        1
    """
    senders: dict[str, list[str]] = {}
    for sender, receiver in edges:
        senders.setdefault(sender, [])
        senders.setdefault(receiver, []).append(sender)
    try:
        order = list(TopologicalSorter(senders).static_order())
    except CycleError as error:
        raise ValueError(f"the edges go in a circle: {' -> '.join(error.args[1])}") from error
    level: dict[str, int] = {}
    for node in order:
        above = [level[sender] for sender in senders[node]]
        level[node] = max(above, default=-1) + 1
    for node in order:  # a node without senders stands just above its first receiver
        if not senders[node]:
            below = [level[other] for other in order if node in senders[other]]
            level[node] = min(below) - 1
    return level


# --------------------------------------------------------------------------------------------------
# Pictures of circuits.
# --------------------------------------------------------------------------------------------------


#: A Vega expression: the name of the node that was chosen by a click, or nothing.
_CHOSEN = "(isValid(chosen.node) ? chosen.node[0] : null)"
#: A row of a chart's data.
_Row = dict[str, Any]

#: Sender, receiver and score: ``("L0H1", "L2H3", 0.7)``.
Edge = tuple[str, str, float]


@dataclass(frozen=True, eq=False)
class CircuitNode:
    """A node of a circuit's picture: its place, labels and strength.

    Attributes:
        column: the place from top to bottom, such as its layer; None: below all senders.
        label: the node's label; None: its name.
        position: the position of its token; None: all positions.
        effect: the direct effect on the metric.
        pattern: the head's attention pattern, ``[query, key]``.

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


#: Facts about nodes, by name.
Nodes = Mapping[str, CircuitNode]


@draws_results
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
    """Draw a circuit as a graph, from top to bottom: a line for each edge, thicker for larger
    scores.

    Blue is positive, orange negative, and dotted lines join related nodes. Hovering over a line
    names its ends; hovering over a node shows its direct effect. In HTML, a slider hides edges with
    smaller scores, and a click on a node highlights its edges and shows its attention pattern.

    Args:
        edges: for each, the sender's name, the receiver's name and a score; or a `Circuit` alone.
        nodes: facts about the nodes, by name. Either all nodes have a column or none; the same
            holds for positions.
        tokens: the text of each position, for nodes that have one, and for patterns:
            ``bridge.to_str_tokens(prompt)``.
        joins: pairs of related nodes without a score, such as a head's input and the head.
        supports: the sign of scores that support the metric, as in a `Circuit`; these are blue.
            None: blue is positive.
        metric: the metric of the scores, such as ``"logit difference"``.
        measure: the name of the scores.
        title: the picture's title.
        width: the maximal width in pixels: 720 is a page, 340 a paper's column. None: as needed.

    Raises:
        ValueError: no edges, a duplicate edge, a score that is not finite, a cycle, columns that do
            not increase along edges, a node of `nodes` without an edge, positions without tokens,
            or a width that is too small for the node labels.
        TypeError: an edge that is not two names and a number.

    Example:
        >>> from bridge import pictures
        >>> pictures.circuit(
        ...     [("embed", "L0H1", 0.9), ("L0H1", "L2H3", 0.7), ("L2H3", "logits", -0.4)]
        ... )
        Picture('Circuit')
    """
    scored = list(edges)
    pairs = [*_ends_of(scored), *joins]
    scores = _scores_of(scored)
    words = [] if tokens is None else token_labels(tokens, len(tokens))
    known = _checked_nodes(nodes or {}, pairs, len(words))
    rows = _node_rows(known, metric)
    graph = _laid_out(pairs, known, rows, width)
    lines = _edge_rows(pairs, scores, rows)
    largest = max(line["size"] for line in lines) or 1.0
    joined = range(len(lines), len(pairs))

    layers = [
        _lines(graph, joined, strokeDash=[2, 3], opacity=0.6, color=colour("ink")),
        _edge_lines(graph, lines, largest, supports == "negative", measure),
        *_boxes(graph, rows),
        _tokens(graph, words),
    ]
    chart = _interactive(graph, layers, largest, _patterns(known, rows, words))
    legend = f"{_colours(supports, metric, measure)}; width: {measure}, up to {largest:g}"
    if joined:
        legend += "; dotted: the inputs of one head"
    letters = (width or 720) // 8
    heading = alt.Title(textwrap.wrap(title, letters), subtitle=textwrap.wrap(legend, letters))
    return finished(chart, heading, usermeta={"details": True})


def _colours(supports: str | None, metric: str, measure: str) -> str:
    if supports is None:
        return f"blue: positive {measure}, orange: negative"
    return f"blue: the {metric} falls without it, orange: it rises"


def _interactive(
    graph: GraphLayout, layers: list[alt.Chart], largest: float, patterns: list[alt.Chart]
) -> alt.HConcatChart:
    """Return the layers as one chart with a slider, and the attention patterns beside it."""
    size = {"width": round(graph.width), "height": _LEVEL * (len(graph.levels) + 1)}
    chart = alt.hconcat(alt.layer(*layers).properties(**size), *patterns, spacing=30)
    slider = alt.binding_range(min=0, max=largest, step=largest / 100, name="hide edges below ")
    return chart.add_params(alt.param(name="least", value=0, bind=slider))


def _laid_out(
    pairs: Pairs, nodes: Nodes, rows: Mapping[str, _Row], width: int | None
) -> GraphLayout:
    """Return the layout of a circuit, and write the places of the nodes into their rows.

    Raises:
        ValueError: it is wider than the width.
    """
    columns: dict[str, int] = {}
    positions: dict[str, int] = {}
    for name, node in nodes.items():
        if node.column is not None:
            columns[name] = node.column
        if node.position is not None:
            positions[name] = node.position
    levels = columns or levels_of(pairs)
    box = max(46, width_of([row["label"] for row in rows.values()]))
    graph = GraphLayout(pairs, levels, positions, box)
    for name, stop in graph.nodes.items():
        rows[name] |= {"x": stop.x, "y": stop.level * _LEVEL}
    if width is not None:
        check_positive("width", width)
        least = round(graph.width) + _AROUND
        if width < least:
            raise ValueError(f"width is {width}; the labels of these nodes need {least} or more")
    return graph


def _node_rows(nodes: Nodes, metric: str) -> dict[str, _Row]:
    """Return each node with its label, its full name, and the text of its tooltip."""
    rows: dict[str, _Row] = {}
    for name, node in nodes.items():
        label = full = node.label or visible(name)
        if node.position is not None:
            full += f" [{node.position}]"
        tip = full
        if node.effect is not None:
            tip += f"; direct effect on the {metric}: {node.effect:+.3g}"
        rows[name] = {"node": name, "label": label, "name": full, "tip": tip}
    return rows


def _tokens(graph: GraphLayout, words: Sequence[str]) -> alt.Chart:
    """Return the tokens, each above its band."""
    rows: list[_Row] = []
    for position, middle in zip(graph.bands, graph.middles, strict=False):
        rows.append({"token": words[position], "x": middle, "y": -_LEVEL})
    marks = _chart(graph, rows).mark_text(fontStyle="italic", limit=_TOKEN, color=colour("ink"))
    return marks.encode(text="token:N")


def _chart(graph: GraphLayout, rows: Iterable[_Row]) -> alt.Chart:
    """Return a chart of rows that have a place, without marks."""
    text = json.dumps(list(rows), separators=(",", ":"))  # one text: Altair checks no value
    data = alt.InlineData(values=text, format=alt.DataFormat(type="json"))
    across = alt.Scale(domain=[0, graph.width])
    down = alt.Scale(domain=[-_LEVEL, _LEVEL * len(graph.levels)], reverse=True)
    return alt.Chart(data).encode(
        x=alt.X("x:Q", axis=None, scale=across),
        y=alt.Y("y:Q", axis=None, scale=down),
    )


def _lines(graph: GraphLayout, numbers: Iterable[int], **options: Any) -> alt.Chart:
    """Return smooth lines that are upright where they pass a level."""
    rows: list[_Row] = []
    for line in numbers:
        for stop in graph.paths[line]:
            for edge in (-_BOX_HEIGHT / 2, _BOX_HEIGHT / 2):
                y = stop.level * _LEVEL + edge
                rows.append({"line": line, "x": stop.x, "y": y})
    chart = _chart(graph, rows).encode(detail="line:N", order="y:Q")
    return chart.mark_line(interpolate="monotone", orient="horizontal", **options)


def _edge_rows(
    pairs: Pairs, scores: Sequence[float | None], nodes: Mapping[str, _Row]
) -> list[_Row]:
    """Return for each edge its ends' names, its score, and the nodes to which it belongs: its ends,
    and the nodes joined with them.

    Args:
        pairs: sender and receiver of each edge; those beyond the scores are joined.
        scores: the scores.
        nodes: the rows of the nodes.
    """
    related = {name: {name} for name in nodes}
    for sender, receiver in pairs[len(scores) :]:
        related[sender].add(receiver)
        related[receiver].add(sender)
    rows: list[_Row] = []
    for line, score in enumerate(scores):
        sender, receiver = pairs[line]
        row = {
            "line": line,
            "from": nodes[sender]["name"],
            "to": nodes[receiver]["name"],
            "near": sorted(related[sender] | related[receiver]),
            "score": score,
            "size": abs(score or 0),
        }
        rows.append(row)
    return rows


def _edge_lines(
    graph: GraphLayout,
    edges: list[_Row],
    largest: float,
    negative_supports: bool,
    measure: str,
) -> alt.Chart:
    """Return the lines of the edges: strong lines on top, and faint ones if they are away from a
    chosen node.
    """
    weakest_first = sorted(range(len(edges)), key=lambda line: edges[line]["size"])
    facts = alt.LookupData(rows_chart(edges).data, "line", [*edges[0]])
    chart = _lines(graph, weakest_first).transform_lookup("line", from_=facts)
    chart = chart.transform_filter("datum.size >= least")

    widths = alt.Scale(domain=[0, largest], range=[0.6, 8])
    opacities = alt.Scale(type="sqrt", domain=[0, largest], range=[0.3, 0.95])
    opacity = alt.StrokeOpacity("size:Q", scale=opacities, legend=None)
    elsewhere = f"{_CHOSEN} && indexof(datum.near, {_CHOSEN}) < 0"
    orange = "datum.score > 0" if negative_supports else "datum.score < 0"
    return chart.encode(
        color=orange_if(orange),
        strokeOpacity=alt.condition(elsewhere, alt.value(0.08), opacity),
        strokeWidth=alt.StrokeWidth("size:Q", scale=widths, legend=None),
        tooltip=tooltips({"from:N": "from", "to:N": "to", "score:Q": measure}),
    )


def _boxes(graph: GraphLayout, rows: Mapping[str, _Row]) -> list[alt.Chart]:
    """Return the boxes of the nodes, which can be chosen by a click, and their labels."""
    base = _chart(graph, rows.values())
    chosen = alt.selection_point(name="chosen", fields=["node"], on="click", toggle=False)
    bold = f"datum.node === {_CHOSEN}"
    boxes = base.mark_rect(
        width=graph.box,
        height=_BOX_HEIGHT,
        fill=colour("ground"),
        stroke=colour("ink"),
        cornerRadius=4,
    )
    boxes = boxes.encode(strokeWidth=alt.condition(bold, alt.value(3), alt.value(1)))
    tooltip = tooltips({"tip:N": "node"})
    labels = base.mark_text(limit=graph.box - 3, color=colour("ink"))
    return [boxes.add_params(chosen), labels.encode(text="label:N", tooltip=tooltip)]


def _patterns(nodes: Nodes, rows: Mapping[str, _Row], words: Sequence[str]) -> list[alt.Chart]:
    """Return the attention pattern of the chosen node; initially of the node with the largest
    effect. Zeros, such as masked entries, stay blank. Nothing, if no node has a pattern.

    Args:
        nodes: all nodes.
        rows: their rows.
        words: the tokens.
    """
    patterns: list[_Row] = []
    for name, node in nodes.items():
        if node.pattern is not None:
            weights = compact(checked(node.pattern, "a pattern"))
            patterns.append({"node": name, "data": weights})
    if not patterns:
        return []
    strongest = max(patterns, key=lambda row: abs(nodes[row["node"]].effect or 0))
    first = strongest["node"]
    title = f"Attention of the chosen node (before a click: {rows[first]['name']})"
    cell = min(18.0, 320 / len(words))
    queries = Axis("query", words, cell)
    keys = Axis("key", words, cell)
    chart = rows_chart(patterns, title=alt.Title(title, fontSize=12))
    chart = chart.transform_filter(
        f"datum.node === ({_CHOSEN} || {json.dumps(first)})"
    ).transform_flatten(["data"])
    chart = cells(chart, queries, keys).transform_filter("datum.data > 0")
    marks = chart.mark_rect(stroke=colour("ground"), strokeWidth=0.5).encode(
        x=column_axis(keys, 80),
        y=row_axis(queries, 80),
        color=alt.Color("data:Q", scale=sequential(), legend=None),
        tooltip=tooltips({"row:N": "query", "column:N": "key", "data:Q": "weight"}),
    )
    return [marks.properties(width=alt.Step(cell), height=alt.Step(cell))]


def _ends_of(edges: list[Edge]) -> list[tuple[str, str]]:
    """Return sender and receiver of each edge.

    Raises:
        ValueError: there are no edges, or duplicates.
        TypeError: an edge is not two names and a number.
    """
    for edge in edges:
        if len(edge) != 3 or not isinstance(edge[0], str) or not isinstance(edge[1], str):
            raise TypeError(
                "an edge is (sender, receiver, score), such as ('L0H1', 'L2H3', 0.7); one is"
                f" {edge!r}"
            )
    if not edges:
        raise ValueError("there are no edges: the circuit is empty")
    pairs = [(sender, receiver) for sender, receiver, _ in edges]
    for sender, receiver in pairs:
        if pairs.count((sender, receiver)) > 1:
            raise ValueError(f"the edge from {sender!r} to {receiver!r} is given more than once")
    return pairs


def _scores_of(edges: list[Edge]) -> list[float | None]:
    """Return the score of each edge.

    Raises:
        ValueError: one is not finite.
    """
    scores = torch.tensor([float(score) for *_, score in edges], device="cpu")
    return compact(checked(scores, "the scores"))


def _checked_nodes(nodes: Nodes, pairs: Pairs, n_tokens: int) -> Nodes:
    """Return the facts about each node; empty for nodes without any.

    Raises:
        ValueError: a node without an edge, or one that does not fit the tokens.
    """
    ends = {name: CircuitNode() for pair in pairs for name in pair}
    for name, node in nodes.items():
        if name not in ends:
            raise ValueError(f"{name!r} is one of the nodes, and no edge begins or ends there")
        if node.position is not None and not 0 <= node.position < n_tokens:
            raise ValueError(
                f"{name!r} is at position {node.position}, and there are {n_tokens} tokens: tokens"
                " must hold the text of each position"
            )
        if node.pattern is not None and list(node.pattern.shape) != [n_tokens] * 2:
            raise ValueError(
                f"a pattern has shape {list(node.pattern.shape)}, and there are {n_tokens} tokens"
            )
    return ends | dict(nodes)
