"""Lines over layers: the norms of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
from jaxtyping import Float
from torch import Tensor

from bridge.pictures.labels import lookup, token_labels, visible
from bridge.pictures.picture import Picture, finished, rows_chart
from bridge.pictures.style import colour
from bridge.pictures.values import checked, compact, names_for, of_one_prompt


def residual_norms(
    stream: Float[Tensor, "..."],
    tokens: Sequence[str],
    labels: Sequence[str] | None = None,
    *,
    title: str = "Norm of the residual stream",
) -> Picture:
    """How long the residual stream is before each layer: a line for each position, and their median.

    Args:
        stream: what `cache.accumulated_resid` returned, ``[component, pos, d_model]``, with a batch axis of 1 after the
            first or without.
        tokens: the text of each position: ``bridge.to_str_tokens(prompt)``.
        labels: the components' names, which ``return_labels=True`` gives; None: 0, 1, ...
        title: over the picture.

    Raises:
        ValueError: other axes, a batch of several prompts, names of another number, a value that is not finite.

    Example:
        >>> from bridge import TransformerBridge, pictures
        >>> bridge = TransformerBridge.boot_embedded()
        >>> _, cache = bridge.run_with_cache("Mary and John")
        >>> stream, labels = cache.accumulated_resid(return_labels=True)
        >>> pictures.residual_norms(stream, bridge.to_str_tokens("Mary and John"), labels)
        Picture('Norm of the residual stream')
    """
    norms = of_one_prompt(checked(stream, "the stream"), 3, "the stream is [component, pos, d_model]").norm(dim=-1)
    names = [visible(name) for name in names_for(labels, len(norms), "", "labels")]
    positions = token_labels(tokens, norms.shape[1])
    rows = [
        {"i": i, "p": p, "v": value}
        for i, row in enumerate(norms)
        for p, value in enumerate(compact(row))
    ]  # fmt: skip
    base = (
        rows_chart(rows)
        .transform_calculate(component=lookup(names, "datum.i"), token=lookup(positions, "datum.p"))
        .encode(
            x=alt.X("i:O", title="stream", axis=alt.Axis(labelExpr=lookup(names, "datum.value"), labelAngle=-45)),
            y=alt.Y("v:Q", title="norm (L2)", scale=alt.Scale(type="log" if bool((norms > 0).all()) else "symlog")),
        )
    )
    tooltip = [
        alt.Tooltip("p:Q", title="position"),
        alt.Tooltip("token:N", title="token"),
        alt.Tooltip("component:N", title="component"),
        alt.Tooltip("v:Q", title="norm"),
    ]
    each = base.mark_line(strokeWidth=1, opacity=0.45, color=colour("line")).encode(detail="p:N")
    dots = base.mark_circle(size=28, opacity=0.75, color=colour("line")).encode(tooltip=tooltip)
    median = base.mark_line(strokeWidth=3, color=colour("accent")).encode(y="median(v):Q", tooltip=alt.Tooltip(
        "median(v):Q", title="median over positions", format=".3~g"
    ))  # fmt: skip
    told = alt.Title(title, subtitle="thin: each position; thick: their median")
    return finished(each + median + dots, told, width=max(320, min(620, 42 * len(names))), height=260)
