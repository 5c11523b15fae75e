"""Runs the examples of pages that show pictures, and puts each picture under the code that made it.

A page with `bridge.pictures` in its Python blocks is run from top to bottom, as the tests do. Where
the last line of a block is an expression whose value is a `Picture`, it is shown there. On the page
of a notebook, an experiment or a technique, what a cell prints and its other values are shown too.

A page of an experiment on a real model is not run: it shows the outputs stored in its notebook.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pprint
import tempfile
from pathlib import Path
from typing import Any

import notebook_pages
from docutils import nodes

from tools.notebooks import INSTALL, ON_REAL_MODEL

LIBRARY, DRAW = "vega.js", "draw.js"
SHOWN = (f"{notebook_pages.FOLDER}/", "learn_", "how_to_", "symptoms")  # pages that show output


def last_value(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """Runs code, and gives back the value of its last line where that is an expression."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace) if last else None


def printed_block(text: str) -> nodes.Node:
    """Return the node that shows a text that a cell prints."""
    return nodes.literal_block("", text.rstrip(), language="text")


def put_below(block: nodes.Element, outputs: list[nodes.Node]) -> None:
    """Put outputs under the code that made them."""
    after = block.parent.index(block) + 1
    block.parent[after:after] = outputs


def stored_outputs(notebook: Path) -> list[list[nodes.Node]]:
    """Return the outputs of each cell of code but the one that installs the package.

    Args:
        notebook: the notebook's file.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    of_cells = []
    for cell in cells:
        if cell["cell_type"] != "code" or "".join(cell["source"]) == INSTALL:
            continue
        shown: list[nodes.Node] = []
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                source = f"data:image/png;base64,{''.join(data['image/png']).strip()}"
                image = f'<img class="bridge-stored" alt="the picture of this cell" src="{source}">'
                shown.append(nodes.raw("", image, format="html"))
            else:
                shown.append(printed_block("".join(data["text/plain"])))
        of_cells.append(shown)
    return of_cells


def show(app: Any, doctree: nodes.document) -> None:
    """Puts the pictures of a page in their places."""
    blocks = [
        block for block in doctree.findall(nodes.literal_block) if block.get("language") == "python"
    ]
    if app.env.docname.startswith(ON_REAL_MODEL):
        notebook = Path(app.srcdir).parent / "examples" / f"{app.env.docname}.ipynb"
        for block, outputs in zip(blocks, stored_outputs(notebook), strict=True):
            put_below(block, outputs)
        return
    shows = app.env.docname.startswith(SHOWN)
    if not shows and not any(
        "pictures" in block.astext() or ".draw(" in block.astext() for block in blocks
    ):
        return
    import torch

    from bridge.pictures import Picture
    from bridge.pictures.embedding import STYLE

    shown = 0
    namespace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.enable_grad():
        for block in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = last_value(block.astext(), app.env.docname, namespace)
            below: list[nodes.Node] = []
            if isinstance(value, Picture):
                below = [nodes.raw("", value.fragment(), format="html")]
                shown += 1
            elif value is not None:
                printed.write(pprint.pformat(value, width=110))
            if shows and printed.getvalue():
                below.insert(0, printed_block(printed.getvalue()))
            put_below(block, below)
    if shown:
        up = "../" * app.env.docname.count("/")
        scripts = "".join(f'<script src="{up}_static/{name}"></script>' for name in (LIBRARY, DRAW))
        doctree.append(nodes.raw("", f"<style>{STYLE}</style>{scripts}", format="html"))


def write_scripts(app: Any, error: Exception | None) -> None:
    """Puts Vega, which is part of vl-convert, and the drawing script next to the pages."""
    if error is None and app.builder.format == "html":
        from bridge.pictures.embedding import drawing_script, library

        place = Path(app.outdir) / "_static"
        (place / LIBRARY).write_text(library(), encoding="utf-8")
        (place / DRAW).write_text(drawing_script(), encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    app.connect("doctree-read", show)
    app.connect("build-finished", write_scripts)
    return {"parallel_read_safe": True}
