"""Heat maps: patching, attribution, head contributions, composition."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import torch
from jaxtyping import Float
from torch import Tensor

from bridge.pictures.pictures import Picture, finished, rows_chart
from bridge.pictures.results import draws_results
from bridge.pictures.style import (
    checked,
    colour,
    colour_bar,
    compact,
    ink_on,
    limit,
    lookup,
    names_for,
    of_one_prompt,
    orange_if,
    scale_of,
    token_labels,
    tooltips,
    visible,
    width_of,
    without_batch,
)

# --------------------------------------------------------------------------------------------------
# Grids of coloured cells, the basis of most pictures.
# --------------------------------------------------------------------------------------------------


#: A placeholder for a missing value: a number that no activation reaches.
BLANK = 1e300


@dataclass(frozen=True)
class Axis:
    """An axis of a grid.

    Attributes:
        title: the axis title, such as ``query``.
        labels: the name of each row or column.
        cell: the size of a cell in pixels.
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
    """Draw cells in rows and columns, coloured by a value, in one panel or several.

    Args:
        values: ``[row, column]``, or ``[panel, row, column]`` with `panels`; cells with values that
            are not finite stay blank.
        rows, columns: the axes.
        scale: the colour scale.
        measure: the name of the value, for the legend and tooltips.
        title: the picture's title.
        panels: a name for each panel.
        panels_wide: the number of panels side by side.
        sides: the names of the rows and columns of panels, for a table of panels without row and
            column labels of their own; None: panels have labels, and a narrow page may put fewer
            side by side.
        numbers: write each value into its cell (without `panels`).
        blank: the tooltip of a blank cell; None: no tooltip.

    Example:
        >>> import torch
        >>> from bridge.pictures.heat_maps import Axis, grid
        >>> from bridge.pictures.style import sequential
        >>> side = Axis("side", ["a", "b"], 20)
        >>> grid(torch.eye(2), side, side, sequential(), "value", "Two by two").title
        'Two by two'
    """
    digits = 4 if numbers else 3
    chart = _cells_of(compact(values, digits), rows, columns, panels, blank)
    shown = {} if panels is None else {"panel:N": "panel"}
    shown |= {"row:N": rows.title, "column:N": columns.title}
    shown["data:Q" if blank is None else "said:N"] = measure
    chart = chart.encode(
        x=column_axis(columns, 80),
        y=row_axis(rows, 140 if panels is None else 100),
        color=_shade(scale, measure, blank is not None),
        tooltip=tooltips(shown),
    )
    if sides is not None:
        chart = _without_labels(chart, rows, columns)
    # Without "invalid", Vega skips missing numbers.
    mark: dict[str, Any] = {} if blank is None else {"invalid": None}
    line = min(1.0, columns.cell / 12)
    drawn: Any = chart.mark_rect(stroke=colour("ground"), strokeWidth=line, **mark)
    if numbers:
        if blank is not None:
            chart = chart.transform_filter(f"datum.data !== {BLANK}")
        drawn += _numbers(chart, values, scale)
    wrap = 0
    if panels is not None:
        if sides is None:
            drawn = _wrapped(drawn, panels, panels_wide)
            wrap = len(panels)
        else:
            drawn = _table(drawn, *sides)
    size = {"width": alt.Step(columns.cell), "height": alt.Step(rows.cell)}
    return finished(drawn, title, usermeta={"wrap": wrap}, **size)


def _cells_of(
    values: Sequence[float | None],
    rows: Axis,
    columns: Axis,
    panels: Sequence[str] | None,
    blank: str | None,
) -> alt.Chart:
    """Return a chart of the cells, with their panels and the text of blank ones, without marks."""
    # The values are a flat list of numbers; each value's place follows from its index.
    numbered = [BLANK if value is None else value for value in values]
    chart = cells(rows_chart(numbered), rows, columns)
    if panels is not None:
        n_cells = len(rows.labels) * len(columns.labels)
        chart = chart.transform_calculate(p=f"floor((datum.n - 1) / {n_cells})")
        chart = chart.transform_calculate(panel=lookup(panels, "datum.p"))
    if blank is None:
        return chart.transform_filter(f"datum.data !== {BLANK}")
    return chart.transform_calculate(
        said=f"datum.data === {BLANK} ? {json.dumps(blank)} : datum.data",
        shade=f"datum.data === {BLANK} ? null : datum.data",
    )


def _shade(scale: alt.Scale, measure: str, with_blanks: bool) -> Any:
    """Return the colour of the cells.

    Args:
        scale: the colour scale.
        measure: the name of the value.
        with_blanks: whether cells without a value are drawn.
    """
    color: Any = alt.Color("data:Q", scale=scale, legend=colour_bar(scale, measure))
    if with_blanks:
        color = alt.condition("datum.shade === null", alt.value(colour("blank")), color)
        color["shorthand"] = "shade:Q"
    return color


def cells(chart: alt.Chart, rows: Axis, columns: Axis) -> alt.Chart:
    """Return a chart of a flat list, with the place of each value: ``r`` and ``c``, ``row`` and
    ``column``.

    Args:
        chart: a chart with a row for each cell, row by row.
        rows, columns: the axes.
    """
    n_rows, n_columns = len(rows.labels), len(columns.labels)
    return (
        chart.transform_window(n="row_number()")
        .transform_calculate(
            r=f"floor((datum.n - 1) / {n_columns}) % {n_rows}", c=f"(datum.n - 1) % {n_columns}"
        )
        .transform_calculate(
            row=lookup(rows.labels, "datum.r"), column=lookup(columns.labels, "datum.c")
        )
    )


def row_axis(rows: Axis, limit: int) -> alt.Y:
    """Return the rows of `cells` with their labels.

    Args:
        rows: the axis.
        limit: the largest width of a label in pixels.
    """
    axis = alt.Axis(labelAngle=0, labelLimit=limit, **_axis_options(rows))
    return alt.Y("r:O", axis=axis, scale=_every_place(rows))


def column_axis(columns: Axis, limit: int) -> alt.X:
    """Return the columns of `cells` with their labels, which are turned if they are wide.

    Args:
        columns: the axis.
        limit: the largest width of a label in pixels.
    """
    angle = 0 if columns.cell >= width_of(columns.labels) else -90
    axis = alt.Axis(labelAngle=angle, labelLimit=limit, **_axis_options(columns))
    return alt.X("c:O", axis=axis, scale=_every_place(columns))


def _without_labels(chart: alt.Chart, rows: Axis, columns: Axis) -> alt.Chart:
    return chart.encode(
        x=alt.X("c:O", axis=None, scale=_every_place(columns)),
        y=alt.Y("r:O", axis=None, scale=_every_place(rows)),
    )


def _axis_options(axis: Axis) -> dict[str, Any]:
    plain = {"ticks": False, "domain": False, "grid": False, "labelOverlap": True}
    return {"title": axis.title, "labelExpr": lookup(axis.labels, "datum.value"), **plain}


def _every_place(axis: Axis) -> alt.Scale:
    """Return a scale with a place for each row or column, even if all its cells are blank."""
    return alt.Scale(domain=list(range(len(axis.labels))))


def _wrapped(drawn: alt.Chart, panels: Sequence[str], wide: int) -> alt.Chart:
    """Arrange panels in full rows; if that is impossible, each panel has its own column labels."""
    header = alt.Header(labelExpr=lookup(panels, "datum.value"), title=None)
    most = min(wide, len(panels))
    full = next(n for n in range(most, 0, -1) if len(panels) % n == 0)
    even = 2 * full >= most
    facet = alt.Facet("p:O", columns=full if even else wide, header=header, spacing=14)
    return drawn.encode(facet=facet).resolve_axis(x="shared" if even else "independent")


def _table(drawn: alt.Chart, rows: Sequence[str], columns: Sequence[str]) -> alt.Chart:
    """Arrange panels in a table whose rows and columns have names."""
    n = len(columns)
    row_labels = lookup(rows, "datum.value")
    row_header = alt.Header(labelExpr=row_labels, title=None, labelAngle=0, labelAlign="left")
    column_header = alt.Header(labelExpr=lookup(columns, "datum.value"), title=None)
    drawn = drawn.transform_calculate(q=f"floor(datum.p / {n})", k=f"datum.p % {n}")
    return drawn.encode(
        row=alt.Row("q:O", header=row_header, spacing=3),
        column=alt.Column("k:O", header=column_header, spacing=3),
    )


def _numbers(chart: alt.Chart, values: Tensor, scale: alt.Scale) -> alt.Chart:
    """Return the values in their cells, in a text colour that is readable on the cell's colour."""
    domain = scale.to_dict()["domain"]
    ink = ink_on(f"datum.data / {domain[-1]}", signed=domain[0] < 0)
    text = alt.Text("data:Q", format=".2f" if limit(values) < 100 else ".3~g")
    return chart.mark_text(fontSize=10, tooltip=False).encode(text=text, color=ink)


# --------------------------------------------------------------------------------------------------
# Any table, and the results of patching.
# --------------------------------------------------------------------------------------------------


_POSITIONS = ("pos", "dest_pos", "src_pos")
_AXES = ("layer", "head", *_POSITIONS)


@draws_results
def heat_map(
    values: Float[Tensor, "..."],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    panels: Sequence[str] | None = None,
    row_title: str = "row",
    column_title: str = "column",
    measure: str = "value",
    title: str = "Values",
) -> Picture:
    """Draw any table of numbers, coloured on a scale from zero, or one that is centred at zero if a
    value is negative.

    Args:
        values: ``[row, column]``, or ``[panel, row, column]``; or an `InterchangeTable` alone.
        rows, columns, panels: the names along each axis; None: numbers. Spaces and line ends in
            names are made visible.
        row_title, column_title: the titles of the axes.
        measure: the name of the value.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a wrong number of names, a value that is not finite.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> pictures.heat_map(torch.randn(2, 3), ["a", "b"], ["x", "y", "z"], title="Some numbers")
        Picture('Some numbers')
    """
    table = checked(values, "the values")
    if table.ndim not in (2, 3):
        raise ValueError(
            "a heat map is of [row, column] or [panel, row, column]; the shape is"
            f" {list(table.shape)}"
        )
    row_names = [visible(name) for name in names_for(rows, table.shape[-2], "", "rows")]
    column_names = [visible(name) for name in names_for(columns, table.shape[-1], "", "columns")]
    if table.ndim == 2 and panels is not None:
        raise ValueError(
            f"panels are named, and the values of shape {list(table.shape)} have one panel only"
        )
    panel_names = names_for(panels, len(table), "", "panels") if table.ndim == 3 else None
    return _map(
        table, (row_title, row_names), (column_title, column_names), measure, title, panel_names
    )


@draws_results
def patching(
    results: Float[Tensor, "..."],
    axes: str,
    tokens: Sequence[str] | None = None,
    *,
    panels: Sequence[str] | None = None,
    clean: float | None = None,
    corrupted: float | None = None,
    metric: str = "metric",
    title: str = "Activation patching",
) -> Picture:
    """Draw patching results of `bridge.patching`, or of any other patching with these axes.

    Args:
        results: the result of a patching function; a `PatchingResult` or `PatchedEverything`
            alone, which know their axes. If all values of a layer are NaN, as in a layer
            without the activation (a hybrid's layer without attention), its cells stay blank and
            their tooltips say so.
        axes: the names of its axes: ``"layer pos"``, ``"layer head"``, ``"layer pos head"``,
            ``"layer head dest_pos src_pos"``. `panels` names one more leading axis.
        tokens: the text of each position, if positions are an axis:
            ``bridge.to_str_tokens(prompt)``.
        panels: for results of several activations, their names:
            ``["resid_pre", "attn_out", "mlp_out"]``.
        clean, corrupted: the metric of both unpatched runs. With them, 0 is the corrupted run and 1
            the clean run; without them, the colours show the metric itself.
        metric: the name of the metric, such as ``"logit difference"``.
        title: the picture's title.

    Raises:
        ValueError: unknown axes, or axes and names that do not match the results; a value that is
            not finite in a layer with other values, or in all layers; only one of `clean` and
            `corrupted`, or two equal ones.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> results = torch.tensor([[0.0, 1.5], [0.2, 3.0]])
        >>> pictures.patching(results, "layer pos", ["<bos>", " Mary"], clean=3.0, corrupted=0.0)
        Picture('Activation patching')
    """
    names = _axis_names(axes)
    values = checked(results, "the results", absent=_absent_layers(results, names))
    lead = 0 if panels is None else 1
    if values.ndim != lead + len(names):
        more = " and one more for the panels" if lead else ""
        raise ValueError(
            f"{axes!r} are {len(names)} axes{more}; the results have shape {list(values.shape)}"
        )
    values, shown, heading = _restored(values, clean, corrupted, metric, title)
    row, column = _sides(names)
    labels = _labels(names, values.shape[lead:], tokens)
    groups = [] if panels is None else [names_for(panels, len(values), "", "panels")]
    for axis in names:
        if axis not in (row, column):
            groups.append([f"{axis} {label}" for label in labels[axis]])
    ends = [lead + names.index(axis) for axis in (row, column)]
    values = values.movedim(ends, [-2, -1])
    panel_names = None
    if groups:
        panel_names = [", ".join(group) for group in itertools.product(*groups)]
        values = values.flatten(0, -3)
    return _map(
        values,
        (row.replace("_", " "), labels[row]),
        (column.replace("_", " "), labels[column]),
        shown,
        heading,
        panel_names,
        blank="no such part",
    )


def _axis_names(axes: str) -> list[str]:
    """Return the names of axes.

    Raises:
        ValueError: an unknown name, a name twice, or fewer than two.
    """
    names = axes.split()
    if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= set(_AXES):
        raise ValueError(
            f"axes is {axes!r}; it must name two or more different ones of {', '.join(_AXES)}"
        )
    return names


def _absent_layers(results: Tensor, names: Sequence[str]) -> Tensor | None:
    """Return where results are NaN in an entire layer, but not in all layers, for each panel
    separately.
    """
    if not isinstance(results, Tensor) or "layer" not in names or results.ndim < len(names):
        return None
    layer = results.ndim - len(names) + names.index("layer")
    others = [axis for axis in range(results.ndim - len(names), results.ndim) if axis != layer]
    nan = results.detach().to("cpu").isnan().all(dim=others, keepdim=True)
    return (nan & ~nan.all(dim=layer, keepdim=True)).expand(results.shape)


def _restored(
    values: Tensor, clean: float | None, corrupted: float | None, metric: str, title: str
) -> tuple[Tensor, str, str | alt.Title]:
    """Return the values (as shares of the recoverable effect if both metrics are known), their
    meaning, and the title.

    Raises:
        ValueError: only one of the metrics is passed, or both are equal.
    """
    if clean is None and corrupted is None:
        return values, metric, title
    if clean is None or corrupted is None:
        raise ValueError(
            "give both clean and corrupted, the metric of the two unpatched runs, or neither"
        )
    if clean == corrupted:
        raise ValueError(
            f"clean and corrupted are both {clean}: there is nothing that patching could restore"
        )
    ends = (
        f"0: the {metric} of the corrupted run, {corrupted:.3g}; 1: of the clean run, {clean:.3g}"
    )
    shares = (values - corrupted) / (clean - corrupted)
    return shares, f"restored {metric}", alt.Title(title, subtitle=ends)


def _labels(
    names: Sequence[str], sizes: Sequence[int], tokens: Sequence[str] | None
) -> dict[str, list[str]]:
    """Return the labels of the places along each axis.

    Raises:
        ValueError: an axis counts positions, and there are no tokens.
    """
    labels: dict[str, list[str]] = {}
    for axis, size in zip(names, sizes, strict=True):
        if axis not in _POSITIONS:
            labels[axis] = [str(index) for index in range(size)]
        elif tokens is None:
            raise ValueError(
                f"{axis!r} is an axis: tokens must hold the text of its {size} positions"
            )
        else:
            labels[axis] = token_labels(tokens, size)
    return labels


def _sides(names: Sequence[str]) -> tuple[str, str]:
    """Return the axes for rows and columns; the others become panels."""
    if "dest_pos" in names and "src_pos" in names:
        return "dest_pos", "src_pos"
    rows = "layer" if "layer" in names else names[0]
    others = [name for name in names if name != rows]
    columns = next((name for name in others if name in _POSITIONS), others[-1])
    return rows, columns


def attribution(
    values: Float[Tensor, "..."],
    components: Sequence[str],
    tokens: Sequence[str] | None = None,
    *,
    measure: str = "contribution",
    title: str = "Direct logit attribution",
) -> Picture:
    """Draw each component's contribution to a logit or logit difference: bars at one position, else
    a heat map.

    Args:
        values: the result of `cache.logit_attrs`, ``[component, pos]``, or ``[component]`` for one
            position, with or without a batch axis of 1 after the first.
        components: the components' names from ``return_labels=True``.
        tokens: the text of each position; None: the values are of one position.
        measure: the meaning of the numbers, such as ``"added to logit(Mary) - logit(John)"``.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, or a wrong number of names.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> stack, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
        >>> pictures.attribution(cache.logit_attrs(stack, " John", " Mary", pos_slice=-1), labels)
        Picture('Direct logit attribution')
    """
    table = checked(values, "the attributions")
    axes, n_axes = "[component, pos]", 2
    if tokens is None:
        axes, n_axes = "[component] (tokens would name positions)", 1
    table = of_one_prompt(table, n_axes, f"attributions are {axes}")
    names = [visible(name) for name in names_for(components, len(table), "", "components")]
    if tokens is None:
        return _bars(table, names, measure, title)
    positions = token_labels(tokens, table.shape[1])
    return _map(table, ("component", names), ("position", positions), measure, title)


@draws_results
def heads(
    values: Float[Tensor, "..."],
    *,
    measure: str = "contribution",
    title: str = "Heads",
) -> Picture:
    """Draw one number for each head, layers down, heads across: contributions, detector scores,
    ablation effects.

    Args:
        values: ``[layer, head]``, with or without a leading batch axis of 1; or `EdgeScores` or
            `NodeScores` alone.
        measure: the meaning of the numbers.
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, a value that is not finite.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge, pictures
        >>> from bridge.analysis.logit_lens import head_contributions
        >>> bridge = TransformerBridge.boot_embedded()
        >>> john, mary = (
        ...     torch.tensor([bridge.to_single_token(name)]) for name in (" John", " Mary")
        ... )
        >>> pictures.heads(head_contributions(bridge, bridge.to_tokens("Mary and"), john, mary))
        Picture('Heads')
    """
    table = without_batch(checked(values, "the heads' values"), 2, "values of heads [layer, head]")
    layers, across = ([str(index) for index in range(n)] for n in table.shape)
    return _map(table, ("layer", layers), ("head", across), measure, title)


def composition(
    scores: Float[Tensor, "..."],
    *,
    labels: Sequence[str] | None = None,
    title: str = "Composition of heads",
) -> Picture:
    """Draw how much each head reads from each earlier head: writing heads down, reading heads
    across.

    Args:
        scores: ``bridge.all_composition_scores(mode)``, ``[writing layer, head, reading layer,
            head]``. Pairs whose reader is not in a later layer stay blank.
        labels: the names of all heads, such as ``bridge.attn_head_labels``; None: ``L0H0``, ...
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, or a wrong number of names.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pictures.composition(bridge.all_composition_scores("K"), title="K-composition")
        Picture('K-composition')
    """
    table = checked(scores, "the scores")
    shape = list(table.shape)
    if table.ndim != 4 or shape[:2] != shape[2:]:
        raise ValueError(f"composition scores are [layer, head, layer, head]; the shape is {shape}")
    n_layers, n_heads = shape[:2]
    if n_layers < 2:
        raise ValueError(
            f"scores of shape {shape} are of one layer: no head reads from an earlier one"
        )
    names = [f"L{layer}H{head}" for layer in range(n_layers) for head in range(n_heads)]
    if labels is not None:
        names = [visible(label) for label in names_for(labels, len(names), "", "labels")]
    layer = torch.arange(n_layers, device="cpu")
    later = (layer[:, None, None, None] < layer[None, None, :, None]).expand(table.shape)
    table = table.masked_fill(~later, float("-inf"))
    # The last layer has no readers, the first layer no writers.
    table = table[:-1, :, 1:].reshape((n_layers - 1) * n_heads, -1)
    cell = max(4.0, min(22.0, 700 / len(names)))
    writers = Axis("writing head", names[:-n_heads], cell)
    readers = Axis("reading head", names[n_heads:], cell)
    return grid(table, writers, readers, scale_of(table), "score", title)


def _map(
    table: Tensor,
    rows: tuple[str, list[str]],
    columns: tuple[str, list[str]],
    measure: str,
    title: str | alt.Title,
    panels: list[str] | None = None,
    blank: str | None = None,
) -> Picture:
    n_rows, n_columns = table.shape[-2:]
    numbers = False
    if panels is None:
        wide = max(4.0, min(26.0, 1000 / n_columns))
        high = max(8.0, min(24.0, 700 / n_rows))
        if n_columns <= 20 and n_rows <= 40:
            wide, numbers = 42.0, high >= 14
    else:
        wide = max(4.0, min(26.0, 300 / n_columns))
        high = max(4.0, min(20.0, 360 / n_rows))
    return grid(
        table,
        Axis(rows[0], rows[1], high),
        Axis(columns[0], columns[1], wide),
        scale_of(table),
        measure,
        title,
        panels=panels,
        panels_wide=max(1, int(1050 // (wide * n_columns + 20))),
        numbers=numbers,
        blank=None if bool(table.isfinite().all()) else blank,
    )


def _bars(values: Tensor, names: list[str], measure: str, title: str) -> Picture:
    rows = []
    for i, value in enumerate(compact(values)):
        rows.append({"i": i, "name": names[i], "v": value})
    axis = alt.Axis(labelExpr=lookup(names, "datum.value"), ticks=False, domain=False)
    base = rows_chart(rows).encode(
        y=alt.Y("i:O", title=None, axis=axis),
        x=alt.X("v:Q", title=measure),
        tooltip=tooltips({"name:N": "component", "v:Q": measure}),
        color=orange_if("datum.v < 0"),
    )
    high = 18 if len(names) <= 40 else max(3.0, 720 / len(names))
    return finished(base.mark_bar(), title, width=420, height=alt.Step(high))
