"""What a picture really draws: its marks, read back from the SVG, each with what it says of
itself.
"""

from __future__ import annotations

import html
import re

from bridge.pictures import Picture


def marks(picture: Picture) -> list[dict[str, str]]:
    """The marks that say what they are, in order: for each what stands in its hover text."""
    found = []
    for label in re.findall(
        r'aria-label="([^"]*)" role="graphics-symbol"[^>]*aria-roledescription', picture.svg()
    ):
        pairs = [part.split(": ", 1) for part in html.unescape(label).split("; ")]
        found.append(dict(pairs))
    assert found, "nothing is drawn"
    return found


def number(text: str) -> float:
    """A number as Vega writes it."""
    return float(text.replace("−", "-"))
