"""Writes the notebooks of examples/, with their outputs: `python -m tools.notebooks [NAME ...]`.

An experiment is written once, as a page: `docs/learn_*.md`. Its notebook is that page, cut at its
blocks of Python. The other notebooks are their own source. All are run, and stored with what they
print and with their pictures as PNG.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
#: What begins the names of experiments on a real model: the site shows their stored outputs.
ON_REAL_MODEL = "learn_smollm_"
#: What is kept of an output, as a notebook that is read on a page runs no script.
KEPT = ("image/png", "text/plain")
#: The first cell of code: on a machine without the package it installs an uploaded wheel.
INSTALL = """\
# On Colab, first upload the wheel that `make dist` builds. Elsewhere this does nothing.
import glob
import importlib.util

if importlib.util.find_spec("bridge") is None:
    (wheel,) = glob.glob("transformer_bridge-*.whl")
    %pip install --quiet '{wheel}[pictures,harvest]'"""
_BLOCK = re.compile(r"```python\n(.*?)```\n?", re.DOTALL)


def pages() -> list[Path]:
    """The pages that are experiments."""
    return sorted((ROOT / "docs").glob("learn_*.md"))


def cells_of(page: str) -> list[tuple[str, str]]:
    """A page as cells: ``(kind, source)``, with the links as they are from examples/, and with the
    cell that installs the package below the first one.

    Args:
        page: its Markdown.

    Example:
        >>> from tools.notebooks import cells_of
        >>> title, install, first = cells_of("# A\\n\\n[b](b.md)\\n\\n```python\\n1 + 1\\n```\\n")
        >>> title, first
        (('markdown', '# A\\n\\n[b](../docs/b.md)'), ('code', '1 + 1'))
    """
    found = []
    for at, part in enumerate(_BLOCK.split(page)):
        text = part.strip("\n")
        if at % 2:
            found.append(("code", text))
        elif text:
            found.append(("markdown", re.sub(r"\]\(([\w/]+\.md)", r"](../docs/\1", text)))
    return [*found[:1], ("code", INSTALL), *found[1:]]


def notebook_of(page: Path) -> Any:
    """The notebook of a page, without outputs.

    Args:
        page: the page.
    """
    import nbformat

    made = nbformat.v4.new_notebook()
    kinds = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    for at, (kind, text) in enumerate(cells_of(page.read_text(encoding="utf-8"))):
        cell = kinds[kind](text)
        cell["id"] = f"cell-{at}"
        made.cells.append(cell)
    made.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    return made


def executed(notebook: Any, on_real_model: bool = False) -> Any:
    """A notebook after a run from top to bottom.

    Args:
        notebook: it is changed.
        on_real_model: whether it finds the model that `make real` fetches.

    Raises:
        CellExecutionError: a cell fails.
    """
    from nbclient import NotebookClient

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ |= {
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "JUPYTER_PLATFORM_DIRS": "1",
        "TQDM_DISABLE": "1",
    }
    real = {"TRANSFORMER_BRIDGE_REAL": str(ROOT / ".venv" / "real")} if on_real_model else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        client = NotebookClient(notebook, timeout=900, kernel_name="python3")
        return client.execute(cwd=folder, env={**real, **os.environ})


def kept(notebook: Any) -> Any:
    """A notebook with what is stored of its outputs: text, and pictures as PNG.

    Args:
        notebook: as it was run; it is changed.
    """
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            if "data" in output:
                for kind in [kind for kind in output.data if kind not in KEPT]:
                    del output.data[kind]
    return notebook


def main(names: list[str]) -> None:
    """Writes them.

    Args:
        names: which; none: all.
    """
    import nbformat

    of_pages = {page.stem: page for page in pages()}
    for name in names or sorted({*of_pages, *(path.stem for path in EXAMPLES.glob("*.ipynb"))}):
        path = EXAMPLES / f"{name}.ipynb"
        notebook = (
            notebook_of(of_pages[name]) if name in of_pages else nbformat.read(path, as_version=4)
        )
        run = executed(notebook, name.startswith(ON_REAL_MODEL))
        nbformat.write(kept(run), path)
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
