"""Pictures: figures of analysis results that show themselves and are saved without a browser.

Input: tensors and names, never a bridge (except that `logit_lens` decodes words with one). Output:
a `Picture`.

The mechanism, in order:

1. A function (`attention`, `heat_map`, `circuit`, `tokens`, ...) checks its numbers
   (`bridge.pictures.style.checked`): a NaN would be a blank cell that looks like a zero. It keeps
   as many digits as are visible.
2. It builds an Altair chart: a Vega-Lite specification that contains the numbers. Every colour is
   an expression of one parameter, ``dark``, so the same picture is drawn on light and dark
   backgrounds.
3. `finished` applies the shared fonts and lines.
4. `Picture` draws it. vl-convert renders still images (PNG, SVG, PDF) in this process; HTML
   contains Vega's own script (`bridge.pictures.embedding`), so nothing is downloaded. In a
   notebook, the first output holds that script for all pictures.

It raises an error for numbers that are not finite, a wrong number of names or tokens, and a batch
of several prompts where one is drawn. It must not compute: the caller computes what is shown.
"""

from __future__ import annotations

import base64
import copy
import html
import itertools
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from bridge.pictures.embedding import Spec, document, fragment, library, library_name, output
from bridge.pictures.style import configuration, dark_parameter

# --------------------------------------------------------------------------------------------------
# PNG files made smaller.
# --------------------------------------------------------------------------------------------------


def packed(png: bytes) -> bytes:
    """Compress an image losslessly to about a quarter of its size: vl-convert hardly compresses it.

    Args:
        png: a PNG file.

    Example:
        >>> import vl_convert
        >>> from bridge.pictures.pictures import packed
        >>> png = vl_convert.svg_to_png(
        ...     '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"/>'
        ... )
        >>> len(packed(png)) <= len(png), packed(png)[:4]
        (True, b'\\x89PNG')
    """
    at, data, others = 8, b"", []
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind = png[at + 4 : at + 8]
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        else:
            others.append(png[at : at + 12 + length])
        at += 12 + length
    small = b"IDAT" + zlib.compress(zlib.decompress(data), 9)
    chunk = struct.pack(">I", len(small) - 4) + small + struct.pack(">I", zlib.crc32(small))
    # The last chunk marks the end of the file.
    return png[:8] + b"".join([*others[:-1], chunk, others[-1]])


#: Numbers the outputs of this process: the first holds the drawing library for all.
_outputs = itertools.count()


class Picture:
    """A figure that a notebook shows, and that can be saved.

    A notebook shows it as the last value of a cell, on the notebook's own light or dark background.
    Hovering over a mark describes it.

    Args:
        chart: an Altair chart whose colours follow a parameter ``dark``.
        title: the picture's title.

    Attributes:
        chart: the Altair chart, which can be changed with Altair's own methods.
        title: the picture's title.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> picture = pictures.heads(
        ...     torch.tensor([[0.5, -1.0], [0.0, 2.0]]), title="Two layers of two heads"
        ... )
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

    def spec(self, dark: bool = False) -> Spec:
        """Return the Vega-Lite specification as a new dictionary.

        Args:
            dark: draw for a dark background.

        Example:
            >>> import torch
            >>> from bridge import pictures
            >>> picture = pictures.heads(torch.eye(2))
            >>> picture.spec(dark=True)["params"][0]
            {'name': 'dark', 'value': True}
        """
        spec: Spec = copy.deepcopy(self.chart.to_dict())
        heading = spec.get("title") or spec.get("vconcat", [{}])[0].get("title")
        subtitle = heading.get("subtitle", []) if isinstance(heading, dict) else []
        if not isinstance(subtitle, str):
            subtitle = " ".join(subtitle)
        spec["description"] = f"{self.title}. {subtitle}"
        for parameter in spec["params"]:
            if parameter["name"] == "dark":
                parameter["value"] = dark
        return spec

    def fragment(self) -> str:
        """Return the picture's placeholder in a page that has the scripts of
        `bridge.pictures.embedding`.
        """
        return fragment(self.spec(), self._n_values())

    def html(self) -> str:
        """Return a self-contained page with this picture; its background follows the reader's
        system setting.
        """
        return document(self.title, self.fragment())

    def png(self, dark: bool = False, scale: float = 2.0) -> bytes:
        """Return the picture as a PNG.

        Args:
            dark: draw for a dark background.
            scale: the number of image pixels per pixel.
        """
        return packed(vl_convert.vegalite_to_png(self._still(dark), scale=scale))

    def svg(self, dark: bool = False) -> str:
        """Return the picture as an SVG.

        Args:
            dark: draw for a dark background.
        """
        still = self._still(dark)
        title, description = html.escape(self.title), html.escape(still["description"])
        head = f' role="graphics-document"><title>{title}</title><desc>{description}</desc>'
        return vl_convert.vegalite_to_svg(still).replace(">", head, 1)

    def pdf(self, dark: bool = False) -> bytes:
        """Return the picture as a PDF page of the picture's size.

        Args:
            dark: draw for a dark background.
        """
        return vl_convert.vegalite_to_pdf(self._still(dark))

    def _still(self, dark: bool) -> Spec:
        """Return the specification without the parts that only a click would show."""
        spec = self.spec(dark)
        if spec.get("usermeta", {}).get("details"):
            spec |= spec.pop("hconcat")[0]
            del spec["spacing"]
        return spec

    def save(
        self,
        path: str | os.PathLike[str],
        dark: bool = False,
        scale: float = 2.0,
        *,
        linked: bool = False,
    ) -> Path:
        """Write the picture to a file: an HTML page, a PNG, an SVG, or a PDF.

        Args:
            path: the file; its suffix selects the format: ``.html``, ``.png``, ``.svg`` or
                ``.pdf``.
            dark: draw for a dark background (an HTML page follows the reader's system).
            scale: for a PNG, the number of image pixels per pixel.
            linked: for an HTML page: whether the drawing library (0.9 MB) is in a file beside it,
                shared by all pages of the folder, and not inline.

        Returns:
            The path.

        Raises:
            ValueError: an unknown suffix; `linked` for a format other than HTML.

        Example:
            >>> import tempfile, torch
            >>> from bridge import pictures
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pictures.heads(torch.eye(2)).save(f"{folder}/heads.png").stat().st_size > 1000
            True
        """
        path = Path(path)
        if linked and path.suffix.lower() != ".html":
            raise ValueError(
                f"{path.name} holds no drawing library that could be linked; an .html page does"
            )
        match path.suffix.lower():
            case ".html" if linked:
                path.with_name(library_name()).write_text(library(), encoding="utf-8")
                path.write_text(
                    document(self.title, self.fragment(), linked=True), encoding="utf-8"
                )
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
                    f"{path} ends in {other or 'nothing'}: a picture is saved as .html, .png, .svg"
                    " or .pdf"
                )
        return path

    def _n_values(self) -> int:
        data = getattr(self.chart, "data", None)
        values = data.values if isinstance(data, alt.Data) else None
        return len(values) if isinstance(values, list) else 0

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return the notebook output: HTML with a still image, and the image alone where HTML is
        not shown (PDF).
        """
        png = self.png(scale=1)
        text = output(
            self.spec(), self._n_values(), png, self.title, with_library=next(_outputs) == 0
        )
        return {
            "text/html": text,
            "image/png": base64.b64encode(png).decode(),
            "text/plain": repr(self),
        }


def finished(
    chart: alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart | alt.HConcatChart,
    title: str | alt.Title,
    **properties: Any,
) -> Picture:
    """Return a chart as a picture, in the fonts and colours that all pictures share.

    Args:
        chart: the chart.
        title: the picture's title.
        properties: further properties of the chart.
    """
    chart = chart.properties(title=title, config=configuration(), **properties)
    text = title if isinstance(title, str) else title.text
    lines = [text] if isinstance(text, str) else text
    return Picture(chart.add_params(dark_parameter()), " ".join(lines))


def rows_chart(rows: list[Any], **properties: Any) -> alt.Chart:
    """Return a chart of rows of values, without marks.

    Args:
        rows: the values.
        properties: properties of the chart.
    """
    return alt.Chart(alt.Data(values=rows), **properties)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Several pictures as one.
# --------------------------------------------------------------------------------------------------


def together(pictures: Sequence[Picture], title: str) -> Picture:
    """Stack pictures vertically into one picture.

    Args:
        pictures: pictures without clicks or sliders: not circuits or `attention_text`.
        title: the title of the stacked picture.

    Raises:
        ValueError: there are no pictures, or one with a click or a slider.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> pictures.together(
        ...     [pictures.heads(torch.eye(2)), pictures.heads(torch.eye(3))], "Two models"
        ... )
        Picture('Two models')
    """
    if not pictures:
        raise ValueError("there are no pictures to be put together")
    charts, panels = [], []
    for picture in pictures:
        spec = picture.spec()
        panels.append(spec.get("usermeta", {}).get("wrap", 0))
        if [parameter["name"] for parameter in spec["params"]] != ["dark"]:
            raise ValueError(
                f"{picture!r} has parts that answer a click: it stands alone, or on a `page`"
            )
        chart: Any = copy.deepcopy(picture.chart)
        chart.config = chart.params = chart.usermeta = alt.Undefined
        charts.append(chart)
    stack = alt.vconcat(*charts, spacing=24).resolve_scale(color="independent")
    return finished(stack, alt.Title(title, fontSize=16), usermeta={"wrap": panels})


# --------------------------------------------------------------------------------------------------
# Pages of text and pictures.
# --------------------------------------------------------------------------------------------------


def page(title: str, parts: Iterable[str | Picture]) -> str:
    """Return a self-contained HTML page of text and pictures.

    Args:
        title: the page's title and first heading.
        parts: in order, pictures and paragraphs of text. A text that starts with ``## `` is a
            heading.

    Returns:
        The page, to be written to a file.

    Raises:
        TypeError: a part that is neither a text nor a picture.

    Example:
        >>> import torch
        >>> from bridge import pictures
        >>> picture = pictures.heads(torch.tensor([[1.0, -1.0]]))
        >>> text = pictures.page("Two heads", ["## One layer", "They differ.", picture])
        >>> text.startswith("<!doctype html>"), "<h2>One layer</h2>" in text
        (True, True)
    """
    return document(title, "\n".join([f"<h1>{html.escape(title)}</h1>", *map(_part, parts)]))


def _part(part: str | Picture) -> str:
    if isinstance(part, Picture):
        return part.fragment()
    if not isinstance(part, str):
        raise TypeError(
            f"a part of a page is {type(part).__name__}; it must be a text or a picture"
        )
    if part.startswith("## "):
        return f"<h2>{html.escape(part[3:])}</h2>"
    return f"<p>{html.escape(part)}</p>"
