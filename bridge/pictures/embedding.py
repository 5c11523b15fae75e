"""Pictures inside HTML: what stands for one of them, the scripts that draw it, and a page around both.

Vega's JavaScript is part of vl-convert and is written into the page: nothing is fetched.
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

#: What Vega-Lite draws, as it is written in JSON.
Spec = dict[str, Any]
#: Beyond this many values a picture is drawn on a canvas: so many elements would make the page slow.
MOST_SVG_VALUES = 8000


def _file(name: str) -> str:
    """A part of pages that is a file of its own."""
    return "\n" + Path(__file__).with_name("in_html").joinpath(name).read_text(encoding="utf-8")


STYLE, _PAGE_STYLE = _file("picture.css"), _file("page.css")
#: Draws every picture on the ground that it stands on: a page's own theme (Furo, JupyterLab, VS Code) where it has one,
#: otherwise what the reader's system says. Where there is too little room, panels that may wrap do. When ground or room
#: changes, it is drawn again.
_DRAW = _file("draw.js")
#: Unpacks the library where an output of the page holds it, and draws.
_UNPACK = _file("unpack.js")


#: What the bundle is to leave for the drawing script.
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"


@functools.cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, about 0.9 MB.

    Example:
        >>> from bridge.pictures.embedding import library
        >>> "vegaEmbed" in library()
        True
    """
    bundle = vl_convert.javascript_bundle(_GLOBALS).replace("</script", "<\\/script")
    return f"(() => {{\n{bundle}\n}})();"  # its own names would meet those of a page's other scripts


def drawing_script() -> str:
    """The script that draws the pictures of a page, once `library` has run. It may run again when more have come.

    Example:
        >>> from bridge.pictures.embedding import drawing_script
        >>> "vegaEmbed" in drawing_script()
        True
    """
    return _DRAW


def fragment(spec: Spec, n_values: int, still: str = "") -> str:
    """What stands for a picture in a page that has the scripts.

    Args:
        spec: its Vega-Lite specification.
        n_values: how many values it shows.
        still: what is seen until the scripts have drawn it, as HTML.

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
    """A picture for a notebook: seen as it is where no script runs, and drawn where the page has the library.

    Args:
        spec, n_values: as for `fragment`.
        png: the picture in pixels.
        title: what it shows.
        with_library: whether this output holds the library, packed (0.4 MB). One of a page has to.

    Example:
        >>> from bridge.pictures.embedding import output
        >>> len(output({}, 1, b"", "Nothing", with_library=False)) < 10_000
        True
    """
    seen = base64.b64encode(png).decode()
    still = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{seen}">'
    held = f'<script type="text/plain" class="bridge-vega">{_packed_library()}</script>' if with_library else ""
    return f"<style>{STYLE}</style>{fragment(spec, n_values, still)}{held}<script>{_UNPACK}{_DRAW}}})();</script>"


@functools.cache
def _packed_library() -> str:
    return base64.b64encode(gzip.compress(library().encode(), mtime=0)).decode()


@functools.cache
def library_name() -> str:
    """What the library's file is called where pages link to it: another one, of another version, has another name.

    Example:
        >>> from bridge.pictures.embedding import library_name
        >>> library_name().startswith("vega-") and library_name().endswith(".js")
        True
    """
    return f"vega-{hashlib.sha256(library().encode()).hexdigest()[:8]}.js"


def document(title: str, body: str, linked: bool = False) -> str:
    """A page that needs nothing but itself, or nothing but the library beside it.

    Args:
        title: its title, as text.
        body: its body, as HTML.
        linked: the library is in the file `library_name` of the page's folder.

    Example:
        >>> from bridge.pictures.embedding import document
        >>> "<title>Heads &amp; tails</title>" in document("Heads & tails", "<p>Text</p>")
        True
    """
    held = f'<script src="{library_name()}"></script>' if linked else f"<script>{library()}</script>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{_PAGE_STYLE}{STYLE}</style></head>\n<body>\n{body}\n"
        f"{held}\n<script>{_DRAW}</script>\n</body></html>\n"
    )
