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
    width_of,
    without_batch,
)

# ----------------------------------------------------------------------------------------------------------------------
# Grids of coloured cells, one or many: what most pictures are made of.
# ----------------------------------------------------------------------------------------------------------------------


#: What stands for no value: a number that no activation reaches.
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
        >>> from bridge.pictures.heat_maps import Axis, grid
        >>> from bridge.pictures.style import sequential
        >>> side = Axis("side", ["a", "b"], 20)
        >>> grid(torch.eye(2), side, side, sequential(), "value", "Two by two").title
        'Two by two'
    """
    n_rows, n_columns = values.shape[-2:]
    # The values stand alone, in order; where each belongs follows from its number.
    rounded = compact(values, 4 if numbers else 3)
    numbered = [BLANK if value is None else value for value in rounded]  # lists must hold numbers only
    chart = rows_chart(numbered).transform_window(n="row_number()")
    chart = chart.transform_calculate(
        r=f"floor((datum.n - 1) / {n_columns}) % {n_rows}", c=f"(datum.n - 1) % {n_columns}"
    )
    chart = chart.transform_calculate(row=lookup(rows.labels, "datum.r"), column=lookup(columns.labels, "datum.c"))
    told = {"row:N": rows.title, "column:N": columns.title, "data:Q" if blank is None else "said:N": measure}
    if panels is not None:
        chart = chart.transform_calculate(p=f"floor((datum.n - 1) / {n_rows * n_columns})")
        chart = chart.transform_calculate(panel=lookup(panels, "datum.p"))
        told = {"panel:N": "panel", **told}
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
    side = 140 if panels is None else 100
    cells = chart.encode(
        x=alt.X("c:O", axis=_axis(columns, True, 80) if sides is None else None, scale=_all(n_columns)),
        y=alt.Y("r:O", axis=_axis(rows, False, side) if sides is None else None, scale=_all(n_rows)),
        color=color,
        tooltip=tooltips(told),
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


def _all(n: int) -> alt.Scale:
    """A place for each row or column, if all its cells are blank, too."""
    return alt.Scale(domain=list(range(n)))


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


_POSITIONS = ("pos", "dest_pos", "src_pos")
_AXES = ("layer", "head", *_POSITIONS)


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
    """Any table of numbers, coloured on a scale that is centred at zero.

    Args:
        values: ``[row, column]``, or ``[panel, row, column]``.
        rows, columns, panels: the names along each axis; None: their numbers. Spaces and line ends in them are shown.
        row_title, column_title: what the axes count.
        measure: what the value is.
        title: over the picture.

    Raises:
        ValueError: other axes, names of another number, a value that is not finite.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> pictures.heat_map(torch.randn(2, 3), ["a", "b"], ["x", "y", "z"], title="Some numbers")
        Picture('Some numbers')
    """
    table = checked(values, "the values")
    if table.ndim not in (2, 3):
        raise ValueError(f"a heat map is of [row, column] or [panel, row, column]; the shape is {list(table.shape)}")
    row_names = [visible(name) for name in names_for(rows, table.shape[-2], "", "rows")]
    column_names = [visible(name) for name in names_for(columns, table.shape[-1], "", "columns")]
    if table.ndim == 2 and panels is not None:
        raise ValueError(f"panels are named, and the values of shape {list(table.shape)} have one panel only")
    names = names_for(panels, len(table), "", "panels") if table.ndim == 3 else None
    return _map(table, (row_title, row_names), (column_title, column_names), measure, title, names)


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
    """What patching brings back: results of `bridge.patching`, or of any other patching with these axes.

    Args:
        results: what it returned. Where all values of a layer are NaN, as a sweep says of one that has no such part (a
            layer of a hybrid without attention), the cells stay blank, and say so where the mouse points.
        axes: its axes by name: ``"layer pos"``, ``"layer head"``, ``"layer pos head"``,
            ``"layer head dest_pos src_pos"``. One axis more in front is named by `panels`.
        tokens: the text of each position, where positions are an axis: ``bridge.to_str_tokens(prompt)``.
        panels: for results of several activations, their names: ``["resid_pre", "attn_out", "mlp_out"]``.
        clean, corrupted: the metric of both runs, unpatched. With them, 0 is what the corrupted run gives and 1 what
            the clean one gives; without, the colours are the metric itself.
        metric: what was measured, such as ``"logit difference"``.
        title: over the picture.

    Raises:
        ValueError: unknown axes, or axes and names that do not fit the results; a value that is not finite, in a layer
            that has others, or in all layers; only one of `clean` and `corrupted`, or
            two that are equal.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> results = torch.tensor([[0.0, 1.5], [0.2, 3.0]])
        >>> pictures.patching(results, "layer pos", ["<bos>", " Mary"], clean=3.0, corrupted=0.0)
        Picture('Activation patching')
    """
    names = axes.split()
    unknown = [name for name in names if name not in _AXES]
    if unknown or len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"axes is {axes!r}; it must name two or more different ones of {', '.join(_AXES)}")
    values = checked(results, "the results", absent=_absent_layers(results, names))
    if values.ndim != len(names) + (panels is not None):
        more = " and one more for the panels" if panels is not None else ""
        raise ValueError(f"{axes!r} are {len(names)} axes{more}; the results have shape {list(values.shape)}")
    values, shown, heading = _restored(values, clean, corrupted, metric, title)
    row, column = _sides(names)
    sizes = values.shape[values.ndim - len(names) :]
    labels = {axis: _labels(axis, size, tokens) for axis, size in zip(names, sizes, strict=True)}
    rest = [name for name in names if name not in (row, column)]
    lead = [] if panels is None else ["panel"]
    order = [*lead, *names]
    values = values.permute(*(order.index(name) for name in [*lead, *rest, row, column]))
    groups = [names_for(panels, len(values), "", "panels")] if panels is not None else []
    groups += [[f"{axis} {label}" for label in labels[axis]] for axis in rest]
    together = [", ".join(names) for names in itertools.product(*groups)]
    return _map(
        values.reshape(-1, *values.shape[-2:]) if groups else values,
        (row.replace("_", " "), labels[row]),
        (column.replace("_", " "), labels[column]),
        shown,
        heading,
        together if groups else None,
        blank="no such part",
    )


def _absent_layers(results: Tensor, names: Sequence[str]) -> Tensor | None:
    """Where results are NaN in all of a layer, but not in all layers; of each panel apart."""
    if not isinstance(results, Tensor) or "layer" not in names or results.ndim < len(names):
        return None
    layer = results.ndim - len(names) + names.index("layer")
    others = [axis for axis in range(results.ndim - len(names), results.ndim) if axis != layer]
    nan = results.detach().to("cpu").isnan().all(dim=others, keepdim=True)
    return (nan & ~nan.all(dim=layer, keepdim=True)).expand(results.shape)


def _restored(
    values: Tensor, clean: float | None, corrupted: float | None, metric: str, title: str
) -> tuple[Tensor, str, str | alt.Title]:
    """The values as shares of what could be restored, where the two metrics are known; what they are, and the title.

    Raises:
        ValueError: one of the metrics alone is given, or both are the same.
    """
    if clean is None and corrupted is None:
        return values, metric, title
    if clean is None or corrupted is None:
        raise ValueError("give both clean and corrupted, the metric of the two unpatched runs, or neither")
    if clean == corrupted:
        raise ValueError(f"clean and corrupted are both {clean}: there is nothing that patching could restore")
    ends = f"0: the {metric} of the corrupted run, {corrupted:.3g}; 1: of the clean run, {clean:.3g}"
    return (values - corrupted) / (clean - corrupted), f"restored {metric}", alt.Title(title, subtitle=ends)


def _labels(axis: str, size: int, tokens: Sequence[str] | None) -> list[str]:
    """What the places along an axis are called.

    Raises:
        ValueError: they are positions, and there are no tokens.
    """
    if axis not in _POSITIONS:
        return [str(index) for index in range(size)]
    if tokens is None:
        raise ValueError(f"{axis!r} is an axis: tokens must hold the text of its {size} positions")
    return token_labels(tokens, size)


def _sides(names: Sequence[str]) -> tuple[str, str]:
    """Which axes are rows and columns; the others make panels."""
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
    """What each component adds to a logit, or to the difference of two: bars at one position, a heat map over all.

    Args:
        values: what `cache.logit_attrs` returned, ``[component, pos]``, or ``[component]`` for one position, with a
            batch axis of 1 after the first or without.
        components: their names, which ``return_labels=True`` gives.
        tokens: the text of each position; None: the values are of one position.
        measure: what the numbers are, such as ``"added to logit(Mary) - logit(John)"``.
        title: over the picture.

    Raises:
        ValueError: other axes, or another number of names.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> stack, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
        >>> pictures.attribution(cache.logit_attrs(stack, " John", " Mary", pos_slice=-1), labels)
        Picture('Direct logit attribution')
    """
    table = checked(values, "the attributions")
    axes = 1 if tokens is None else 2
    wanted = "[component] (tokens would name positions)" if tokens is None else "[component, pos]"
    table = of_one_prompt(table, axes, f"attributions are {wanted}")
    names = [visible(name) for name in names_for(components, len(table), "", "components")]
    if tokens is None:
        return _bars(table, names, measure, title)
    return _map(table, ("component", names), ("position", token_labels(tokens, table.shape[1])), measure, title)


def heads(
    values: Float[Tensor, "..."],
    *,
    measure: str = "contribution",
    title: str = "Heads",
) -> Picture:
    """One number for each head, layers down, heads across: contributions, scores of a detector, effects of ablation.

    Args:
        values: ``[layer, head]``, with a batch axis of 1 in front or without.
        measure: what the numbers are.
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, a value that is not finite.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge, pictures
        >>> from bridge.analysis.logit_lens import head_contributions
        >>> bridge = TransformerBridge.boot_embedded()
        >>> john, mary = (torch.tensor([bridge.to_single_token(name)]) for name in (" John", " Mary"))
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
    """How much each head reads of what each earlier head writes: writing heads down, reading heads across.

    Args:
        scores: ``bridge.all_composition_scores(mode)``, ``[writing layer, head, reading layer, head]``. Pairs in which
            the reader is in no later layer stay blank.
        labels: the names of all heads, such as ``bridge.attn_head_labels``; None: ``L0H0``, ...
        title: over the picture.

    Raises:
        ValueError: other axes, or another number of names.

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
        raise ValueError(f"scores of shape {shape} are of one layer: no head reads from an earlier one")
    names = [f"L{layer}H{head}" for layer in range(n_layers) for head in range(n_heads)]
    if labels is not None:
        names = [visible(label) for label in names_for(labels, len(names), "", "labels")]
    layer = torch.arange(n_layers)
    later = (layer[:, None, None, None] < layer[None, None, :, None]).expand(table.shape)
    table = table.masked_fill(~later, float("-inf"))
    # The last layer writes for nobody, the first one reads from nobody.
    table = table[:-1, :, 1:].reshape((n_layers - 1) * n_heads, -1)
    cell = max(4.0, min(22.0, 700 / len(names)))
    writers, readers = Axis("writing head", names[:-n_heads], cell), Axis("reading head", names[n_heads:], cell)
    scale = sequential(limit(table)) if not bool((table[table.isfinite()] < 0).any()) else diverging(limit(table))
    return grid(table, writers, readers, scale, "score", title)


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
    few = panels is None and n_columns <= 20 and n_rows <= 40
    wide = 42.0 if few else max(4.0, min(26.0, (1000 if panels is None else 300) / n_columns))
    high = max(8.0, min(24.0, 700 / n_rows)) if panels is None else max(4.0, min(20.0, 360 / n_rows))
    return grid(
        table,
        Axis(rows[0], rows[1], high),
        Axis(columns[0], columns[1], wide),
        diverging(limit(table)),
        measure,
        title,
        panels=panels,
        panels_wide=max(1, int(1050 // (wide * n_columns + 20))),
        numbers=few and high >= 14,
        blank=None if bool(table.isfinite().all()) else blank,
    )


def _bars(values: Tensor, names: list[str], measure: str, title: str) -> Picture:
    rows = [{"i": i, "name": name, "v": v} for i, (name, v) in enumerate(zip(names, compact(values), strict=True))]
    base = rows_chart(rows).encode(
        y=alt.Y("i:O", title=None, axis=alt.Axis(labelExpr=lookup(names, "datum.value"), ticks=False, domain=False)),
        x=alt.X("v:Q", title=measure),
        tooltip=tooltips({"name:N": "component", "v:Q": measure}),
        color=alt.condition("datum.v < 0", alt.value(colour("accent")), alt.value(colour("line"))),
    )
    high = 18 if len(names) <= 40 else max(3.0, 720 / len(names))
    return finished(base.mark_bar(), title, width=420, height=alt.Step(high))
