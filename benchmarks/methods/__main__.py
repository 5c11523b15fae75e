"""Measures docs/methods.md and writes its table.

    python -m benchmarks.methods [WORD ...]

Words: prints the rows whose names contain one of them, and writes nothing. It needs the packages of
`make clients`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")  # which a package starts, otherwise

import benchmarks.methods.by_hand
import benchmarks.methods.packages  # noqa: F401 - declares rows
from benchmarks.methods.table import METHODS, Method

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
HEAD = ["| method | paper | compared with | model | largest difference |", "|---|---|---|---|---|"]


def row(method: Method) -> str:
    """Return a measured row of the table."""
    cells = (
        f"[{method.name}]({method.page})",
        f"[{method.paper}]({method.link})",
        method.code,
        method.model,
        f"{method.difference():.0e}",
    )
    return f"| {' | '.join(cells)} |"


def write(lines: list[str]) -> None:
    """Put the table between the marks of the page.

    Raises:
        ValueError: the page has no such marks.
    """
    page = PAGE.read_text(encoding="utf-8")
    marks = re.compile(r"(<!-- measured: methods -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise ValueError(f"{PAGE.name} needs <!-- measured: methods --> and <!-- end -->")
    table = "\n".join(lines)
    new = marks.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page)
    PAGE.write_text(new, encoding="utf-8")


def main(words: list[str]) -> None:
    chosen = [m for m in METHODS if not words or any(word in m.name for word in words)]
    lines = []
    for method in sorted(chosen, key=lambda method: method.page):
        lines.append(row(method))
        print(lines[-1], flush=True)
    if not words:
        write(HEAD + lines)


if __name__ == "__main__":
    main(sys.argv[1:])
