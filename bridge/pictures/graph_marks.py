"""The lines and boxes of a graph that stands in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from bridge.pictures.labels import width_of
from bridge.pictures.picture import rows_chart
from bridge.pictures.style import colour

#: The chosen node, a Vega expression of its number, and whether there is one.
PICKED = "(isValid(picked.i) ? picked.i[0] : null)"
SOME_PICKED = "(isValid(picked.i) && isValid(picked.i[0]))"


@dataclass(frozen=True)
class Graph:
    """Nodes by their numbers, where they stand, and what joins them.

    Attributes:
        pairs: sender and receiver of each line; those behind the scores are joined without one.
        scores: of the first pairs.
        labels, names: of each node what is written on it, and what tells it from all others.
        places: of each node its column and its row.
        paths: of each pair the stops after its sender.
        rows: how high the graph is.
        bands: the rows of tokens, at the left.
    """

    pairs: Sequence[tuple[int, int]]
    scores: Sequence[float]
    labels: Sequence[str]
    names: Sequence[str]
    places: Sequence[tuple[int, float]]
    paths: Sequence[Sequence[tuple[int, float]]]
    rows: float
    bands: Sequence[tuple[str, float]]

    @property
    def box(self) -> int:
        """The width of a node's box in pixels."""
        return max(46, width_of(self.labels))

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return 1 + max(column for column, _ in self.places)

    @property
    def gap(self) -> int:
        """The pixels from one column to the next."""
        return max(self.box + 40, min(150, 760 // self.columns))

    def near(self, line: int) -> list[int]:
        """The nodes whose edge a line is: its ends, and what is joined with them."""
        ends = self.pairs[line]
        joined = [pair for pair in self.pairs[len(self.scores) :] if set(pair) & set(ends)]
        return sorted({*ends, *(node for pair in joined for node in pair)})

    def strongest(self, node: int) -> float:
        """The largest score, of either sign, of an edge at a node."""
        return max((abs(v) for v, pair in zip(self.scores, self.pairs, strict=False) if node in pair), default=0.0)

    def drawn(self, measure: str, negative_supports: bool) -> alt.LayerChart | alt.FacetChart:
        """Lines, then boxes, then words.

        Args:
            measure: what a score is.
            negative_supports: blue is negative.
        """
        margin = (width_of([token for token, _ in self.bands]) + 6) / self.gap if self.bands else 0.0
        left, right = -0.5 - margin, self.columns - 0.5
        across = alt.Scale(domain=[left, right], nice=False)
        down = alt.Scale(domain=[-self.rows / 2 - 0.1, self.rows / 2 + 0.1], nice=False, reverse=True)

        def x(name: str) -> alt.X:
            return alt.X(f"{name}:Q", axis=None, scale=across)

        def y(name: str) -> alt.Y:
            return alt.Y(f"{name}:Q", axis=None, scale=down)

        layers = [self._joined(x("x"), y("y")), self._lines(x("x"), y("y"), measure, negative_supports)]
        base = rows_chart([self._node(i) for i in range(len(self.labels))]).transform_filter("datum.m >= least")
        picked = alt.selection_point(name="picked", fields=["i"], on="click", toggle=False)
        width = alt.condition(f"{PICKED} === datum.i", alt.value(3), alt.value(1.2))
        layers.append(
            base.mark_rect(fill=colour("ground"), stroke=colour("ink"), cornerRadius=4, cursor="pointer")
            .encode(x=x("x0"), x2="x1:Q", y=y("y0"), y2="y1:Q", strokeWidth=width)
            .add_params(picked)
        )
        layers.append(
            base.mark_text(fontSize=11, color=colour("ink"), limit=self.box - 4, cursor="pointer").encode(
                x=x("x"), y=y("y"), text="n:N", tooltip=alt.Tooltip("t:N", title="node")
            )
        )
        if self.bands:
            bands = [{"t": token, "x": left, "y": round(row, 3)} for token, row in self.bands]
            words = rows_chart(bands).mark_text(fontSize=11, color=colour("ink"), align="left", fontStyle="italic")
            layers.insert(0, words.encode(x=x("x"), y=y("y"), text="t:N"))
        return alt.layer(*layers).properties(
            width=round(self.gap * (right - left)), height=max(60, round(44 * (self.rows + 0.2)))
        )

    def _node(self, i: int) -> dict[str, Any]:
        px, py = self.places[i]
        half = self.box / self.gap / 2
        corners = {"x0": px - half, "x1": px + half, "y0": py - 0.32, "y1": py + 0.32}
        told = {"i": i, "m": self.strongest(i), "n": self.labels[i], "t": self.names[i], "x": px, "y": round(py, 3)}
        return told | {name: round(value, 3) for name, value in corners.items()}

    def _points(self, lines: Iterable[int]) -> list[dict[str, Any]]:
        half = self.box / self.gap / 2
        return [
            {"e": e, "o": o, "x": round(px, 3), "y": round(py, 3), "m": min(map(self.strongest, self.pairs[e]))}
            for e in lines
            for o, (px, py) in enumerate(_line(self.places[self.pairs[e][0]], self.paths[e], half))
        ]

    def _joined(self, x: alt.X, y: alt.Y) -> alt.Chart:
        return (
            rows_chart(self._points(range(len(self.scores), len(self.pairs))))
            .transform_filter("datum.m >= least")
            .mark_line(interpolate="basis", strokeWidth=1.5, strokeDash=[2, 3], color=colour("ink"), opacity=0.6)
            .encode(x=x, y=y, detail="e:N", order="o:Q")
        )

    def _lines(self, x: alt.X, y: alt.Y, measure: str, negative_supports: bool) -> alt.Chart:
        orange = "datum.v > 0" if negative_supports else "datum.v < 0"
        other = f"{SOME_PICKED} && indexof(datum.near, {PICKED}) < 0"
        largest = max(map(abs, self.scores)) or 1.0
        edges = alt.LookupData(alt.Data(values=self.edges()), "e", ["s", "r", "v", "near"])  # type: ignore[arg-type]
        return (
            rows_chart(self._points(range(len(self.scores))))
            .transform_lookup("e", from_=edges)
            .transform_calculate(size="abs(datum.v)")
            .transform_filter("datum.size >= least")
            .mark_line(interpolate="basis", strokeCap="round")
            .encode(
                x=x,
                y=y,
                detail="e:N",
                order="o:Q",
                color=alt.condition(orange, alt.value(colour("accent")), alt.value(colour("line"))),
                opacity=alt.condition(other, alt.value(0.12), alt.value(0.85)),
                strokeWidth=alt.StrokeWidth(
                    "size:Q", scale=alt.Scale(domain=[0, largest], range=[0.8, 9]), legend=None
                ),
                tooltip=[
                    alt.Tooltip("s:N", title="from"),
                    alt.Tooltip("r:N", title="to"),
                    alt.Tooltip("v:Q", title=measure),
                ],
            )
        )

    def edges(self) -> list[dict[str, Any]]:
        """Each edge with its ends' names, its score, and the nodes whose edge it is."""
        return [
            {"e": e, "s": self.names[s], "r": self.names[r], "v": self.scores[e], "near": self.near(e)}
            for e, (s, r) in enumerate(self.pairs[: len(self.scores)])
        ]


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
