"""Pictures in HTML: the placeholder of a picture, the scripts that draw it, and a page around both.

Vega's JavaScript is part of vl-convert and is inlined into the page, so nothing is downloaded.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
from pathlib import Path
from typing import Any

import vl_convert

#: A Vega-Lite specification in JSON form.
Spec = dict[str, Any]
#: Above this number of values a picture is drawn on a canvas, as so many SVG elements would slow
#: down the page.
MOST_SVG_VALUES = 8000


def _file(name: str) -> str:
    """Return a part of the pages that is stored as a separate file."""
    return "\n" + Path(__file__).with_name("in_html").joinpath(name).read_text(encoding="utf-8")


STYLE, _PAGE_STYLE = _file("picture.css"), _file("page.css")
#: Draws every picture for the background that it has: the page's own theme (Furo, JupyterLab, VS
#: Code) if there is one, otherwise the reader's system setting. Panels that may wrap do so if space
#: is short. The picture is redrawn when background or space changes.
_DRAW = _file("draw.js")
#: Unpacks the library if an output of the page holds it, and draws.
_UNPACK = _file("unpack.js")


#: The globals that the bundle must define for the drawing script.
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"


@functools.cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, about 0.9 MB.

    Example:
        >>> from bridge.pictures.embedding import library
        >>> "vegaEmbed" in library()
        True
    """
    bundle = vl_convert.javascript_bundle(_GLOBALS).replace("</script", "<\\/script")
    return (  # a scope of its own, as its names could collide with those of other scripts
        f"(() => {{\n{bundle}\n}})();"
    )


def drawing_script() -> str:
    """Return the script that draws a page's pictures after `library`. It may run again for new
    pictures.

    Example:
        >>> from bridge.pictures.embedding import drawing_script
        >>> "vegaEmbed" in drawing_script()
        True
    """
    return _DRAW


def fragment(spec: Spec, n_values: int, still: str = "") -> str:
    """Return the placeholder of a picture in a page that has the scripts.

    Args:
        spec: the picture's Vega-Lite specification.
        n_values: the number of values in the picture.
        still: HTML that is shown until the scripts have drawn the picture.

    Example:
        >>> from bridge.pictures.embedding import fragment
        >>> "</b>" in fragment({"title": "</b>"}, 3)
        False
    """
    text = json.dumps(spec, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    renderer = "canvas" if n_values > MOST_SVG_VALUES else "svg"
    return (
        f'<div class="bridge-picture" data-renderer="{renderer}"><div>{still}</div>'
        f'<script type="application/json">{text}</script></div>'
    )


def output(spec: Spec, n_values: int, png: bytes, title: str, with_library: bool) -> str:
    """Return a picture for a notebook: a still image without scripts, drawn if the page has the
    library.

    Args:
        spec, n_values: as for `fragment`.
        png: the picture as a PNG.
        title: the picture's title.
        with_library: whether this output contains the compressed library (0.4 MB). Exactly one
            output of a page needs it.

    Example:
        >>> from bridge.pictures.embedding import output
        >>> len(output({}, 1, b"", "Nothing", with_library=False)) < 10_000
        True
    """
    pixels = base64.b64encode(png).decode()
    still = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{pixels}">'
    held = (
        f'<script type="text/plain" class="bridge-vega">{_packed_library()}</script>'
        if with_library
        else ""
    )
    drawing = fragment(spec, n_values, still)
    script = f"<script>{_UNPACK}{_DRAW}}})();</script>"
    return f"<style>{STYLE}</style>{drawing}{held}{script}"


@functools.cache
def _packed_library() -> str:
    return base64.b64encode(gzip.compress(library().encode(), mtime=0)).decode()


@functools.cache
def library_name() -> str:
    """Return the library's file name for links from pages; it differs between versions.

    Example:
        >>> from bridge.pictures.embedding import library_name
        >>> library_name().startswith("vega-") and library_name().endswith(".js")
        True
    """
    return f"vega-{hashlib.sha256(library().encode()).hexdigest()[:8]}.js"


def document(title: str, body: str, linked: bool = False) -> str:
    """Return a page that is self-contained, or that needs only the library beside it.

    Args:
        title: the page's title, as text.
        body: the page's body, as HTML.
        linked: whether the library is in the file `library_name` of the page's folder.

    Example:
        >>> from bridge.pictures.embedding import document
        >>> "<title>Heads &amp; tails</title>" in document("Heads & tails", "<p>Text</p>")
        True
    """
    held = (
        f'<script src="{library_name()}"></script>' if linked else f"<script>{library()}</script>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta'
        f' charset="utf-8"><title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon"'
        ' href="data:,">\n'
        f"<style>{_PAGE_STYLE}{STYLE}</style></head>\n<body>\n{body}\n"
        f"{held}\n<script>{_DRAW}</script>\n</body></html>\n"
    )
