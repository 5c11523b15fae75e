"""Curves: the norm of the residual stream over layers, the faithfulness of circuits over sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    compact,
    lookup,
    names_for,
    of_one_prompt,
    token_labels,
    tooltips,
    visible,
)


def residual_norms(
    stream: Float[Tensor, "..."] | tuple[Float[Tensor, "..."], Sequence[str]],
    tokens: Sequence[str],
    labels: Sequence[str] | None = None,
    *,
    title: str = "Norm of the residual stream",
) -> Picture:
    """Draw the norm of the residual stream before each layer: a line for each position, and their
    median.

    The token with the largest norm is labelled.

    Args:
        stream: the result of `cache.accumulated_resid`, ``[component, pos, d_model]``, with or
            without a batch axis of 1 after the first; or the pair of it and its labels that
            ``return_labels=True`` gives.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        labels: the components' names from ``return_labels=True``; None: 0, 1, ...
        title: the picture's title.

    Raises:
        ValueError: unsupported axes, a batch of several prompts, a wrong number of names, a value
            that is not finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> _, cache = bridge.run_with_cache("Mary and John")
        >>> stream, labels = cache.accumulated_resid(return_labels=True)
        >>> pictures.residual_norms(stream, bridge.to_str_tokens("Mary and John"), labels)
        Picture('Norm of the residual stream')
    """
    if isinstance(stream, tuple):
        stream, own_labels = stream
        labels = own_labels if labels is None else labels
    norms = of_one_prompt(
        checked(stream, "the stream"), 3, "the stream is [component, pos, d_model]"
    ).norm(dim=-1)
    names = [visible(name) for name in names_for(labels, len(norms), "", "labels")]
    positions = token_labels(tokens, norms.shape[1])
    chart = _norm_layers(norms, names, positions)
    subtitle = "thin: each position; thick: their median; named: the largest"
    heading = alt.Title(title, subtitle=subtitle)
    width = max(320, min(620, 42 * len(names)))
    return finished(chart, heading, width=width, height=260)


def _norms_chart(norms: Tensor, names: Sequence[str], positions: Sequence[str]) -> alt.Chart:
    """Return a chart of the norms in their places, without marks."""
    rows = []
    for i, row in enumerate(norms):
        for p, norm in enumerate(compact(row)):
            rows.append({"i": i, "p": p, "v": norm})
    axis = alt.Axis(labelExpr=lookup(names, "datum.value"), labelAngle=-45)
    scale = alt.Scale(type="log" if bool((norms > 0).all()) else "symlog")
    chart = rows_chart(rows).transform_calculate(
        component=lookup(names, "datum.i"), token=lookup(positions, "datum.p")
    )
    return chart.encode(
        x=alt.X("i:O", title="stream", axis=axis),
        y=alt.Y("v:Q", title="norm (L2)", scale=scale),
    )


def _norm_layers(
    norms: Tensor, names: Sequence[str], positions: Sequence[str]
) -> alt.LayerChart | alt.FacetChart:
    """Return the lines of all positions, their median, and the label of the largest norm."""
    base = _norms_chart(norms, names, positions)
    shown = {"p:Q": "position", "token:N": "token", "component:N": "component", "v:Q": "norm"}
    line = colour("line")
    lines = base.mark_line(strokeWidth=1, strokeOpacity=0.45, color=line).encode(detail="p:N")
    dots = base.mark_circle(size=28, fillOpacity=0.75, color=line).encode(tooltip=tooltips(shown))
    tooltip = alt.Tooltip("median(v):Q", title="median over positions", format=".3~g")
    median = base.mark_line(strokeWidth=3, color=colour("accent"))
    median = median.encode(y="median(v):Q", tooltip=tooltip)

    component, position = divmod(int(norms.argmax()), norms.shape[1])
    beside: dict[str, Any] = {"align": "left", "dx": 8}
    if 2 * component >= len(names):
        beside = {"align": "right", "dx": -8}
    label = base.mark_text(dy=-6, fontSize=11, color=colour("ink"), **beside).encode(text="token:N")
    label = label.transform_filter(f"datum.i == {component} && datum.p == {position}")
    return alt.layer(lines, median, dots, label)


@draws_results
def faithfulness(
    shares: Sequence[float] | Mapping[str, Any],
    values: Mapping[str, Sequence[float]] | None = None,
    intervals: Mapping[str, Float[Tensor, "share 2"]] | None = None,
    *,
    title: str = "Faithfulness of circuits",
) -> Picture:
    """Draw the faithfulness of circuits against their size: a line for each method, a band for its
    interval.

    Args:
        shares: the circuits' shares of all edges; or, alone, a `Curve`, or several of the same
            shares by name.
        values: for each method the faithfulness of the circuit of each size, such as
            `Curve.faithfulness`.
        intervals: for some methods the lower and upper bound, such as
            ``Curve.intervals()["faithfulness"]``.
        title: the picture's title.

    Raises:
        ValueError: nothing to draw, a wrong number of values, intervals without values, a value
            that is not finite.

    Example:
        >>> from bridge import pictures
        >>> pictures.faithfulness(
        ...     [0.01, 0.1, 1.0], {"EAP": [0.2, 0.8, 1.0], "EAP-IG": [0.4, 0.9, 1.0]}
        ... )
        Picture('Faithfulness of circuits')
    """
    if isinstance(shares, Mapping):
        shares, values = _of_curves(shares)
    values, bands = values or {}, dict(intervals or {})
    if not values or bands.keys() - values.keys():
        raise ValueError(
            f"there are values of {', '.join(values) or 'nothing'}, and intervals of"
            f" {', '.join(bands)}"
        )
    rows = []
    for name, line in values.items():
        middle = torch.tensor(line, device="cpu")
        band = bands.get(name, torch.stack([middle, middle], 1))
        if len(line) != len(shares) or list(band.shape) != [len(shares), 2]:
            with_intervals = f", with intervals {list(band.shape)}" if name in bands else ""
            raise ValueError(
                f"{name} has {len(line)} values{with_intervals}, and there are {len(shares)} sizes"
            )
        numbers = checked(torch.cat([middle[:, None], band.cpu()], 1), name)
        for share, (value, low, high) in zip(shares, numbers.tolist(), strict=True):
            rows.append({"s": share, "n": visible(name), "v": value, "low": low, "high": high})
    return _faithfulness_chart(rows, shares, title, bool(bands))


def _of_curves(
    curves: Mapping[str, Any],
) -> tuple[Sequence[float], dict[str, Sequence[float]]]:
    """Return the shares and the values of curves.

    Raises:
        ValueError: there are none, or their shares differ.
    """
    every = {tuple(curve.shares) for curve in curves.values()}
    if len(every) != 1:
        raise ValueError(
            f"the curves {', '.join(curves) or '(none)'} have {len(every)} different lists of"
            " shares; they are drawn together if they have the same"
        )
    return every.pop(), {name: curve.faithfulness for name, curve in curves.items()}


def _faithfulness_chart(
    rows: list[dict[str, Any]], shares: Sequence[float], title: str, with_bands: bool
) -> Picture:
    """Return the lines of faithfulness, and a line at 1."""
    across = alt.Scale(type="log" if min(shares) > 0 else "symlog")
    axis = alt.Axis(format="~%", values=list(shares), labelOverlap="greedy")
    legend = alt.Legend(orient="bottom", symbolOpacity=1)
    base = rows_chart(rows).encode(
        x=alt.X("s:Q", title="share of all edges", scale=across, axis=axis),
        y=alt.Y("v:Q", title="faithfulness"),
        color=alt.Color("n:N", title=None, scale=alt.Scale(scheme="tableau10"), legend=legend),
    )
    tooltip = tooltips({"n:N": "scores"}) + tooltips({"s:Q": "share of edges"}, "~%")
    tooltip += tooltips({"v:Q": "faithfulness", "low:Q": "from", "high:Q": "to"}, ".3f")
    layers = [base.mark_line(strokeWidth=2), base.mark_circle(size=40).encode(tooltip=tooltip)]
    subtitle = "1, dashed: the circuit does what the model does"
    if with_bands:
        area = base.mark_area(opacity=0.2)
        layers.insert(0, area.encode(y=alt.Y("low:Q", title="faithfulness"), y2="high:Q"))
        subtitle += "; bands: intervals over prompts"
    full = (
        rows_chart([{"one": 1}])
        .mark_rule(strokeDash=[4, 4], color=colour("ink"), opacity=0.6)
        .encode(y="one:Q")
    )
    heading = alt.Title(title, subtitle=subtitle)
    return finished(alt.layer(full, *layers), heading, width=460, height=280)
