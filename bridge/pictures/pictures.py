"""Pictures: a figure of what an analysis returned, that shows itself and is saved without a browser.

What comes in: tensors and names, never a bridge (`logit_lens` asks one for words alone). What goes out: a `Picture`.

The mechanism, in order:

1. A function (`attention`, `heat_map`, `circuit`, `tokens`, ...) checks its numbers (`bridge.pictures.style.checked`):
   a NaN would be a hole that looks like a zero. It keeps as many digits as the eye can use.
2. It makes an Altair chart, that is a Vega-Lite specification with the numbers in it. Every colour is an expression of
   one parameter, ``dark``: the same picture is drawn on light and on dark ground.
3. `finished` gives all the same fonts and lines.
4. `Picture` draws it: still ones (PNG, SVG, PDF) by vl-convert, in this process; HTML with Vega's own script inside
   (`bridge.pictures.embedding`), so that nothing is fetched. A notebook's first output holds that script for all.

It refuses numbers that are not finite, names or tokens of another number, and a batch of several prompts where one is
drawn. It must not compute: what is shown was computed by its caller.
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

# ----------------------------------------------------------------------------------------------------------------------
# PNG files made smaller.
# ----------------------------------------------------------------------------------------------------------------------


def packed(png: bytes) -> bytes:
    """The same pixels in a file of about a quarter of the size: vl-convert hardly compresses them.

    Args:
        png: a PNG file.

    Example:
        >>> import vl_convert
        >>> from bridge.pictures.pictures import packed
        >>> png = vl_convert.svg_to_png('<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"/>')
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
    return png[:8] + b"".join([*others[:-1], chunk, others[-1]])  # the last says that the file ends


#: Numbers the outputs of this process: the first holds the drawing library for all.
_outputs = itertools.count()


class Picture:
    """A figure that a notebook shows, and that can be saved.

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

    def spec(self, dark: bool = False) -> Spec:
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
        found: Spec = copy.deepcopy(self.chart.to_dict())
        heading = found.get("title") or found.get("vconcat", [{}])[0].get("title")
        below = heading.get("subtitle", []) if isinstance(heading, dict) else []
        found["description"] = ". ".join([self.title, below if isinstance(below, str) else " ".join(below)])
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
        still = self._still(dark)
        told = f"<title>{html.escape(self.title)}</title><desc>{html.escape(still['description'])}</desc>"
        return vl_convert.vegalite_to_svg(still).replace(">", f' role="graphics-document">{told}', 1)

    def pdf(self, dark: bool = False) -> bytes:
        """The picture in lines, as a page of a PDF of its own size.

        Args:
            dark: on dark ground.
        """
        return vl_convert.vegalite_to_pdf(self._still(dark))

    def _still(self, dark: bool) -> Spec:
        """The specification without what only a click would show."""
        found = self.spec(dark)
        if found.get("usermeta", {}).get("details"):
            found |= found.pop("vconcat")[0]
            found.pop("spacing", None)
            found["params"] = [one for one in found["params"] if one["name"] != "zoom"]  # what moves is clipped: slow
        return found

    def save(
        self, path: str | os.PathLike[str], dark: bool = False, scale: float = 2.0, *, linked: bool = False
    ) -> Path:
        """Writes the picture to a file: an HTML page, a PNG, an SVG, or a PDF.

        Args:
            path: where to; the ending says what: ``.html``, ``.png``, ``.svg`` or ``.pdf``.
            dark: on dark ground (an HTML page follows the reader's system).
            scale: of a PNG, how many pixels stand for one.
            linked: of an HTML page: the drawing library (0.9 MB) is in a file beside it, once for all pages of the
                folder, and not inside.

        Returns:
            The path.

        Raises:
            ValueError: another ending; `linked` for another kind than HTML.

        Example:
            >>> import tempfile, torch
            >>> from bridge import pictures
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pictures.heads(torch.eye(2)).save(f"{folder}/heads.png").stat().st_size > 1000
            True
        """
        path = Path(path)
        if linked and path.suffix.lower() != ".html":
            raise ValueError(f"{path.name} holds no drawing library that could be linked; an .html page does")
        match path.suffix.lower():
            case ".html" if linked:
                path.with_name(library_name()).write_text(library(), encoding="utf-8")
                path.write_text(document(self.title, self.fragment(), linked=True), encoding="utf-8")
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


# ----------------------------------------------------------------------------------------------------------------------
# Several pictures as one.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Pages that tell something in words and pictures.
# ----------------------------------------------------------------------------------------------------------------------


def page(title: str, parts: Iterable[str | Picture]) -> str:
    """One HTML page of words and pictures that needs nothing but itself.

    Args:
        title: its title and first heading.
        parts: in order, pictures and paragraphs of text. A text that starts with ``## `` is a heading.

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
        raise TypeError(f"a part of a page is {type(part).__name__}; it must be a text or a picture")
    if part.startswith("## "):
        return f"<h2>{html.escape(part[3:])}</h2>"
    return f"<p>{html.escape(part)}</p>"
