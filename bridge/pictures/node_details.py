"""What a click on a node of a graph shows: its edges, its direct effect, what it attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from torch import Tensor

from bridge.pictures.graph_marks import PICKED, SOME_PICKED, Graph
from bridge.pictures.labels import lookup, width_of
from bridge.pictures.picture import rows_chart
from bridge.pictures.style import colour, sequential
from bridge.pictures.values import compact

#: Of more edges the largest are shown.
MOST_EDGES = 18


def details(
    graph: Graph,
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


def _sentence(graph: Graph, effects: Mapping[int, float], shown: str, metric: str) -> alt.LayerChart | alt.FacetChart:
    said = []
    for i, label in enumerate(graph.names):
        effect = f"; direct effect: without what it sends to the logits, the {metric} changes by"
        said.append({"i": i, "t": f"{label}{effect} {effects[i]:+.3g}" if i in effects else label})
    base = rows_chart(said, width=600, height=34).transform_filter(f"datum.i === {shown}")
    return alt.layer(
        base.mark_text(align="left", x=0, y=8, fontSize=11, color=colour("ink")).encode(
            text=alt.value("Click a node to see its edges here:")
        ),
        base.mark_text(align="left", x=0, y=26, fontSize=12, fontWeight=600, color=colour("ink")).encode(text="t:N"),
    )


def _bars(graph: Graph, shown: str, measure: str) -> alt.LayerChart | alt.FacetChart:
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
            tooltip=[alt.Tooltip("edge:N", title="edge"), alt.Tooltip("v:Q", title=measure)],
        )
    )
    bars = base.mark_bar(color=colour("line")).encode(x=alt.X("v:Q", axis=None, scale=scale))
    names = base.mark_text(align="left", fontSize=11, color=colour("ink")).encode(x=alt.value(0), text="edge:N")
    numbers = base.mark_text(align="left", fontSize=11, color=colour("ink")).encode(x=alt.value(wide + 206), text="v:Q")
    return alt.layer(bars, names, numbers).properties(width=wide + 250, height=18 * len(rows))


def _pattern(patterns: Mapping[int, Tensor], words: Sequence[str], shown: str) -> alt.LayerChart | alt.FacetChart:
    n = len(words)
    rows = [{"i": i, "w": compact(table)} for i, table in patterns.items()]
    cell = max(5.0, min(18.0, 320 / n))
    places = alt.Scale(domain=list(range(n)))
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
        .transform_calculate(query=lookup(words, "datum.r"), key=lookup(words, "datum.c"))
        .mark_rect(stroke=colour("ground"), strokeWidth=0.5)
        .encode(
            y=alt.Y("r:O", title="query", scale=places, axis=alt.Axis(**labels)),
            x=alt.X("c:O", title="key", scale=places, axis=alt.Axis(labelAngle=-90, **labels)),
            color=alt.Color("w:Q", scale=sequential(), legend=None),
            tooltip=[
                alt.Tooltip("query:N", title="query"),
                alt.Tooltip("key:N", title="key"),
                alt.Tooltip("w:Q", title="weight"),
            ],
        )
    )
    return alt.layer(cells, blank).properties(width=round(cell * n), height=round(cell * n))
