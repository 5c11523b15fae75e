"""The notebooks of examples/ as pages: their text and code. `pictures_in_pages` runs them, as it
runs any page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.notebooks import INSTALL

FOLDER = "notebooks"


def page(notebook: dict[str, Any], name: str) -> str:
    """A notebook's cells as Markdown, with a line that says where it is from.

    Args:
        notebook: as `json.loads` reads it.
        name: the file's name.
    """
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in notebook["cells"]]
    cells = [(text, kind) for text, kind in cells if text != INSTALL]
    # A notebook links to the pages from examples/; its page lies in a folder of docs/.
    cells = [(text.replace("](../docs/", "](../"), kind) for text, kind in cells]
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in cells]
    parts.insert(1, f"*This page is [{name}](../../examples/{name}), run when the site was built.*")
    return "\n\n".join(parts) + "\n"


def write(examples: Path, folder: Path) -> None:
    """Writes a page for each notebook.

    Args:
        examples: where the notebooks are.
        folder: where the pages go.
    """
    folder.mkdir(exist_ok=True)
    wanted = {
        path.stem: page(json.loads(path.read_text(encoding="utf-8")), path.name)
        for path in examples.glob("*.ipynb")
        if not path.stem.startswith("learn_")  # those are pages of docs/ already
    }
    for old in folder.glob("*.md"):
        if old.stem not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def link_notebook(app: Any, docname: str, source: list[str]) -> None:
    """Put a link to the notebook of an experiment below its title."""
    if docname.startswith("learn_"):
        title, _, text = source[0].partition("\n")
        link = f"*[{docname}.ipynb](../examples/{docname}.ipynb) is this page as a notebook.*"
        source[0] = f"{title}\n\n{link}\n{text}"


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    write(Path(app.srcdir).parent / "examples", Path(app.srcdir) / FOLDER)
    app.connect("source-read", link_notebook)
    return {"parallel_read_safe": True}
