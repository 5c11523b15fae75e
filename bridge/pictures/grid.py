"""Grids of coloured cells, one or many: what most pictures are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
from torch import Tensor

from bridge.pictures.labels import lookup, width_of
from bridge.pictures.picture import Picture, finished, rows_chart
from bridge.pictures.style import colour, colour_bar, ink_on
from bridge.pictures.values import compact, limit

#: What stands for no value.
BLANK = 1e300


@dataclass(frozen=True)
class Axis:
    """One side of a grid.

    Attributes:
        title: what is counted, such as ``query``.
        labels: the name of each row or column.
        cell: the pixels that one takes.
    """

    title: str
    labels: Sequence[str]
    cell: float


def grid(
    values: Tensor,
    rows: Axis,
    columns: Axis,
    scale: alt.Scale,
    measure: str,
    title: str | alt.Title,
    panels: Sequence[str] | None = None,
    panels_wide: int = 4,
    sides: tuple[Sequence[str], Sequence[str]] | None = None,
    numbers: bool = False,
    blank: str | None = None,
) -> Picture:
    """Cells in rows and columns, coloured by a value, in one panel or several.

    Args:
        values: ``[row, column]``, or ``[panel, row, column]`` with `panels`; what is not finite stays blank.
        rows, columns: the sides.
        scale: from value to colour.
        measure: what the value is, for legend and hover.
        title: over the picture.
        panels: a name for each panel.
        panels_wide: how many panels are side by side.
        sides: the names of rows and columns of panels, for a table of them without names of rows and columns of their
            own; None: they have these, and a narrow page may put fewer side by side.
        numbers: write each value into its cell (without `panels`).
        blank: what the hover says over a cell that stays blank; None: there is no hover.

    Example:
        >>> import torch
        >>> from bridge.pictures.grid import Axis, grid
        >>> from bridge.pictures.style import sequential
        >>> side = Axis("side", ["a", "b"], 20)
        >>> grid(torch.eye(2), side, side, sequential(), "value", "Two by two").title
        'Two by two'
    """
    n_rows, n_columns = values.shape[-2:]
    # The values stand alone, in order; where each belongs follows from its number.
    chart = rows_chart(_for_vega(values, 4 if numbers else 3)).transform_window(n="row_number()")
    chart = chart.transform_calculate(
        r=f"floor((datum.n - 1) / {n_columns}) % {n_rows}", c=f"(datum.n - 1) % {n_columns}"
    )
    chart = chart.transform_calculate(row=lookup(rows.labels, "datum.r"), column=lookup(columns.labels, "datum.c"))
    tooltip = [
        alt.Tooltip("row:N", title=rows.title),
        alt.Tooltip("column:N", title=columns.title),
        alt.Tooltip("data:Q", title=measure) if blank is None else alt.Tooltip("said:N", title=measure),
    ]
    if panels is not None:
        chart = chart.transform_calculate(p=f"floor((datum.n - 1) / {n_rows * n_columns})")
        chart = chart.transform_calculate(panel=lookup(panels, "datum.p"))
        tooltip.insert(0, alt.Tooltip("panel:N", title="panel"))
    color: Any = alt.Color("data:Q", scale=scale, legend=colour_bar(scale, measure))
    if blank is None:
        chart = chart.transform_filter(f"datum.data !== {BLANK}")
    else:
        chart = chart.transform_calculate(
            said=f"datum.data === {BLANK} ? {json.dumps(blank)} : datum.data",
            shade=f"datum.data === {BLANK} ? null : datum.data",
        )
        color = alt.condition("datum.shade === null", alt.value(colour("blank")), color)
        color["shorthand"] = "shade:Q"
    cells = chart.encode(
        x=alt.X("c:O", axis=_axis(columns, True, 80) if sides is None else None),
        y=alt.Y("r:O", axis=_axis(rows, False, 140 if panels is None else 100) if sides is None else None),
        color=color,
        tooltip=tooltip,
    )
    # As they are: Vega leaves out what has no number.
    shown: dict[str, Any] = {} if blank is None else {"invalid": None}
    drawn: alt.Chart | alt.LayerChart | alt.FacetChart = cells.mark_rect(
        stroke=colour("ground"), strokeWidth=min(1.0, columns.cell / 12), **shown
    )
    if numbers:
        there = cells if blank is None else cells.transform_filter(f"datum.data !== {BLANK}")
        drawn = drawn + _numbers(there, values, scale)
    if panels is not None:
        assert isinstance(drawn, alt.Chart)
        if sides is None:
            drawn = _wrapped(drawn, panels, panels_wide)
        else:
            wide = len(sides[1])
            drawn = drawn.transform_calculate(q=f"floor(datum.p / {wide})", k=f"datum.p % {wide}")
            drawn = drawn.encode(
                row=alt.Row("q:O", header=_header(sides[0], 0), spacing=3),
                column=alt.Column("k:O", header=_header(sides[1], None), spacing=3),
            )
    wrap = len(panels) if panels and sides is None else 0
    size = {"width": alt.Step(columns.cell), "height": alt.Step(rows.cell)}
    return finished(drawn, title, usermeta={"wrap": wrap}, **size)


def _wrapped(drawn: alt.Chart, panels: Sequence[str], wide: int) -> alt.Chart:
    """Panels in rows that are all full; where there are no such, each panel has the names of its own columns."""
    header = alt.Header(labelExpr=lookup(panels, "datum.value"), title=None)
    full = next(n for n in range(min(wide, len(panels)), 0, -1) if len(panels) % n == 0)
    even = 2 * full >= min(wide, len(panels))
    facet = alt.Facet("p:O", columns=full if even else wide, header=header, spacing=14)
    return drawn.encode(facet=facet).resolve_axis(x="shared" if even else "independent")


def _header(names: Sequence[str], angle: int | None) -> alt.Header:
    turned: dict[str, Any] = {} if angle is None else {"labelAngle": angle, "labelAlign": "left"}
    return alt.Header(labelExpr=lookup(names, "datum.value"), title=None, **turned)


def _for_vega(values: Tensor, digits: int) -> list[float]:
    """The numbers in order, with one that no activation reaches for what stays blank (lists must hold numbers only)."""
    return [BLANK if value is None else value for value in compact(values, digits)]


def _axis(axis: Axis, along: bool, longest: int) -> alt.Axis:
    upright = not along or axis.cell >= width_of(axis.labels)
    return alt.Axis(
        title=axis.title,
        labelExpr=lookup(axis.labels, "datum.value"),
        labelAngle=0 if upright else -90,
        labelOverlap=True,
        labelLimit=longest,
        ticks=False,
        domain=False,
        grid=False,
    )


def _numbers(cells: alt.Chart, values: Tensor, scale: alt.Scale) -> alt.Chart:
    """The values in their cells, in ink that is seen on the cell's colour."""
    domain = scale.to_dict()["domain"]
    ink = ink_on(f"datum.data / {domain[-1]}", signed=domain[0] < 0)
    return cells.mark_text(fontSize=10, tooltip=False).encode(
        text=alt.Text("data:Q", format=".2f" if limit(values) < 100 else ".3~g"), color=ink
    )
