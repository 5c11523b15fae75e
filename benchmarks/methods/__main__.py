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

import bridge.legacy.as_transformer_lens  # noqa: F401 - before a package imports the other one
from benchmarks.methods import by_hand, packages  # noqa: F401 - they declare rows
from benchmarks.methods.table import METHODS, Method

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
HEAD = ["| method | paper | compared with | model | largest difference |", "|---|---|---|---|---|"]


def row(method: Method) -> str:
    """Return a measured row of the table."""
    difference = method.difference()
    cells = (
        f"[{method.name}]({method.page})",
        f"[{method.paper}]({method.link})",
        method.other_code,
        method.model,
        f"{difference:.0e}" if difference else "0",
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
    lines = []
    for method in sorted(METHODS, key=lambda method: method.page):
        if words and not any(word in method.name for word in words):
            continue
        lines.append(row(method))
        print(lines[-1], flush=True)
    if not words:
        write(HEAD + lines)


if __name__ == "__main__":
    main(sys.argv[1:])
