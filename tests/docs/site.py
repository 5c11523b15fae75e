"""The built site, read with nothing but the standard library."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "build" / "docs"


class Page(HTMLParser):
    """A page's links, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects what a tag points to."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in (
            "index",
            "search",
            "next",
            "prev",
            "canonical",
        ):
            self.loads.append(values.get("href", ""))
        elif "src" in values:
            self.loads.append(values["src"])

    def target(self, link: str) -> tuple[Path, str]:
        """The file and the anchor that a link of this page points to."""
        address, anchor = urldefrag(link)
        path = self.path if not address else self.path.parent / unquote(address).split("?")[0]
        return path.resolve(), unquote(anchor)


def outside(link: str) -> bool:
    """Whether a link leaves the site."""
    return link.startswith(("http:", "https:", "mailto:", "//"))
