"""Several pictures as one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import altair as alt

from bridge.pictures.picture import Picture, finished


def together(pictures: Sequence[Picture], title: str) -> Picture:
    """Pictures one under the other, as one picture.

    Args:
        pictures: of the kinds that only hovering answers: not circuits or `attention_text`.
        title: over all.

    Raises:
        ValueError: none, or one that a click or a slider changes.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> pictures.together([pictures.heads(torch.eye(2)), pictures.heads(torch.eye(3))], "Two models")
        Picture('Two models')
    """
    if not pictures:
        raise ValueError("there are no pictures to be put together")
    charts, panels = [], []
    for picture in pictures:
        spec = picture.spec()
        panels.append(spec.get("usermeta", {}).get("wrap", 0))
        if [parameter["name"] for parameter in spec["params"]] != ["dark"]:
            raise ValueError(f"{picture!r} has parts that answer a click: it stands alone, or on a `page`")
        chart: Any = copy.deepcopy(picture.chart)
        chart.config = chart.params = chart.usermeta = alt.Undefined
        charts.append(chart)
    whole = alt.vconcat(*charts, spacing=24).resolve_scale(color="independent")
    return finished(whole, alt.Title(title, fontSize=16), usermeta={"wrap": panels})
