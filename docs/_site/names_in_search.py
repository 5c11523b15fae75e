"""The names of a technique as main index entries, which the site's search lists first.

On a page `how_to_*` these are its title and the names in its first parentheses: "Activation
patching (interchange intervention, resample ablation)".
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform


def names(title: str, opening: str) -> list[str]:
    """Return a technique's names.

    Args:
        title: of the page.
        opening: its first paragraph.
    """
    listed = re.search(r"\(([^)]*)\)", opening)
    return title.split(" and ") + (listed[1].split(", ") if listed else [])


class NamesInSearch(SphinxTransform):
    """A step of the build that adds the entries, before Sphinx collects them."""

    default_priority = 400

    def apply(self, **_options: Any) -> None:
        """Add the entries to a technique's page."""
        if not self.env.docname.startswith("how_to_"):
            return
        section = next(self.document.findall(nodes.section))
        opening = next(section.findall(nodes.paragraph)).astext()
        (anchor,) = section["ids"]
        entries = [
            ("single", name, anchor, "main", None) for name in names(section[0].astext(), opening)
        ]
        section.insert(1, addnodes.index(entries=entries))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    app.add_transform(NamesInSearch)
    return {"parallel_read_safe": True}
