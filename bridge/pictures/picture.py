"""`Picture`: a figure that shows itself in a notebook and is saved without a browser."""

from __future__ import annotations

import base64
import copy
import itertools
import os
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from bridge.pictures.embedding import document, fragment, output
from bridge.pictures.pixels import packed
from bridge.pictures.style import configuration, dark_parameter

#: Numbers the outputs of this process: the first holds the drawing library for all.
_outputs = itertools.count()


class Picture:
    """A figure.

    As the last value of a notebook's cell it is shown, on the notebook's own ground, light or dark; hovering over a
    mark says what it is.

    Args:
        chart: an Altair chart whose colours follow a parameter ``dark``.
        title: what it shows.

    Attributes:
        chart: the Altair chart, to be changed as Altair's own documentation says.
        title: what it shows.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> picture = pictures.heads(torch.tensor([[0.5, -1.0], [0.0, 2.0]]), title="Two layers of two heads")
        >>> picture
        Picture('Two layers of two heads')
        >>> picture.png()[:4]
        b'\\x89PNG'
    """

    def __init__(self, chart: alt.TopLevelMixin, title: str) -> None:
        self.chart = chart
        self.title = title

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def spec(self, dark: bool = False) -> dict[str, Any]:
        """The Vega-Lite specification, as a dictionary of its own.

        Args:
            dark: for dark ground.

        Example:
            >>> import torch
            >>> from bridge import pictures
            >>> picture = pictures.heads(torch.eye(2))
            >>> picture.spec(dark=True)["params"][0]
            {'name': 'dark', 'value': True}
        """
        found: dict[str, Any] = copy.deepcopy(self.chart.to_dict())
        found["description"] = self.title
        for parameter in found["params"]:
            if parameter["name"] == "dark":
                parameter["value"] = dark
        return found

    def fragment(self) -> str:
        """What stands for it in a page that has the scripts of `bridge.pictures.embedding`."""
        return fragment(self.spec(), self._n_values())

    def html(self) -> str:
        """A page with this picture that needs nothing but itself; its ground is what the reader's system asks for."""
        return document(self.title, self.fragment())

    def png(self, dark: bool = False, scale: float = 2.0) -> bytes:
        """The picture in pixels.

        Args:
            dark: on dark ground.
            scale: how many pixels stand for one.
        """
        return packed(vl_convert.vegalite_to_png(self._still(dark), scale=scale))

    def svg(self, dark: bool = False) -> str:
        """The picture in lines.

        Args:
            dark: on dark ground.
        """
        return vl_convert.vegalite_to_svg(self._still(dark))

    def pdf(self, dark: bool = False) -> bytes:
        """The picture in lines, as a page of a PDF of its own size.

        Args:
            dark: on dark ground.
        """
        return vl_convert.vegalite_to_pdf(self._still(dark))

    def _still(self, dark: bool) -> dict[str, Any]:
        """The specification without what only a click would show."""
        found = self.spec(dark)
        if found.get("usermeta", {}).get("details"):
            found |= found.pop("vconcat")[0]
            found.pop("spacing", None)
        return found

    def save(self, path: str | os.PathLike[str], dark: bool = False, scale: float = 2.0) -> Path:
        """Writes the picture to a file: one HTML page that needs nothing else, a PNG, an SVG, or a PDF.

        Args:
            path: where to; the ending says what: ``.html``, ``.png``, ``.svg`` or ``.pdf``.
            dark: on dark ground (an HTML page follows the reader's system).
            scale: of a PNG, how many pixels stand for one.

        Returns:
            The path.

        Raises:
            ValueError: another ending.

        Example:
            >>> import tempfile, torch
            >>> from bridge import pictures
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pictures.heads(torch.eye(2)).save(f"{folder}/heads.png").stat().st_size > 1000
            True
        """
        path = Path(path)
        match path.suffix.lower():
            case ".html":
                path.write_text(self.html(), encoding="utf-8")
            case ".png":
                path.write_bytes(self.png(dark, scale))
            case ".svg":
                path.write_text(self.svg(dark), encoding="utf-8")
            case ".pdf":
                path.write_bytes(self.pdf(dark))
            case other:
                raise ValueError(
                    f"{path} ends in {other or 'nothing'}: a picture is saved as .html, .png, .svg or .pdf"
                )
        return path

    def _n_values(self) -> int:
        data = getattr(self.chart, "data", None)
        return len(data.values) if isinstance(data, alt.Data) and isinstance(data.values, list) else 0

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """How a notebook shows it: HTML with a still picture in it, and that picture for what shows no HTML (a PDF)."""
        png = self.png(scale=1)
        text = output(self.spec(), self._n_values(), png, self.title, with_library=next(_outputs) == 0)
        return {"text/html": text, "image/png": base64.b64encode(png).decode(), "text/plain": repr(self)}


def finished(
    chart: alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart,
    title: str | alt.Title,
    **properties: Any,
) -> Picture:
    """A chart as a picture, in the fonts and colours that all share.

    Args:
        chart: the chart.
        title: what it shows.
        properties: others of the chart's.
    """
    whole = chart.properties(title=title, config=configuration(), **properties)
    text = title if isinstance(title, str) else title.text
    return Picture(whole.add_params(dark_parameter()), text)


def rows_chart(rows: list[Any], **properties: Any) -> alt.Chart:
    """A chart of rows of values, without marks.

    Args:
        rows: the values.
        properties: of the chart.
    """
    return alt.Chart(alt.Data(values=rows), **properties)  # type: ignore[arg-type]
