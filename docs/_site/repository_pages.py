"""Markdown of benchmarks/ and tools/ as pages outside the navigation: pages may link to a table
there as they do on GitHub, by `../benchmarks/RESULTS.md#runs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDERS = ("benchmarks", "tools")
#: They belong to no group of the navigation, and a search does not list them.
_HEAD = "---\norphan: true\nno-search: true\n---\n\n"


def write(source: Path, folder: Path) -> None:
    """Write a page for each file.

    Args:
        source: the folder with the files.
        folder: where the pages go.
    """
    folder.mkdir(exist_ok=True)
    texts = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.md")}
    for old in folder.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(_HEAD + text.replace("](../docs/", "](../"), encoding="utf-8")


def point_here(app: Any, docname: str, source: list[str]) -> None:
    """Turn links to the files into links to the pages."""
    up = "../" * docname.count("/")
    for folder in FOLDERS:
        source[0] = source[0].replace(f"]({up}../{folder}/", f"]({up}{folder}/")


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    for folder in FOLDERS:
        write(Path(app.srcdir).parent / folder, Path(app.srcdir) / folder)
    app.connect("source-read", point_here)
    return {"parallel_read_safe": True}
