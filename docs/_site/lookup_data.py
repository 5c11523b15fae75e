"""The data of docs/lookup.md as a script, which a page may load from a folder, too: `lookup.json`,
and the replacements for missing names of TransformerLens.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

PAGE = "lookup"
SCRIPTS = ("lookup_data.js", "lookup.js")


def data(root: Path) -> dict[str, Any]:
    """Return what the page's script reads.

    Args:
        root: the repository.
    """
    sections: dict[str, Any] = json.loads((root / "docs" / "lookup.json").read_text("utf-8"))
    names = tomllib.loads((root / "bridge" / "legacy" / "names.toml").read_text("utf-8"))
    sections["replacements"] = [
        [where, name, text]
        for group in ("missing", "api", "differs")
        for where, entries in names[group].items()
        for name, text in entries.items()
    ]
    return sections


def write_script(app: Any) -> None:
    """Write the data next to the page's script."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data(Path(app.srcdir).parent), ensure_ascii=False, separators=(",", ":"))
    (folder / SCRIPTS[0]).write_text(f"window.lookupData = {text};\n", encoding="utf-8")


def add_scripts(app: Any, pagename: str, *_: Any) -> None:
    """Load both scripts on that page only."""
    for script in SCRIPTS if pagename == PAGE else ():
        app.add_js_file(script)


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    app.connect("builder-inited", write_script)
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True}
