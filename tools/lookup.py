"""Read and write docs/lookup.json, and the tables of docs/properties.md that follow from it.

The scripts that measure (`benchmarks/models.py`, `properties.py` and `reference.py`) write their
sections of the file; docs/lookup.md shows what it says of one model. ``python -m tools.lookup``
writes the tables again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "lookup.json"
PAGE = ROOT / "docs" / "properties.md"
#: The columns of the section "models".
COLUMNS = (
    "task",
    "type",
    "class",
    "family",
    "adapter",
    "offered",
    "tried",
    "points",
    "proved",
    "processed",
    "missing",
)
#: As many configurations as a type is tried in.
CONFIGURATIONS = 3
#: A property of a type, in the strings of the section "holds": the worst of its configurations.
SIGNS = {
    "WRONG": "W",
    "CRASH": "C",
    "refused": "r",
    "part": "p",
    "right": "y",
    "absent": "-",
}
#: The transforms of `process_weights`: digits in the column "processed" count in this tuple.
TRANSFORMS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


def read() -> dict[str, Any]:
    """Return the file's sections by name."""
    sections: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return sections


def write(**sections: Any) -> None:
    """Replace sections of the file, one entry a line, and write the tables that follow from it.

    Args:
        sections: the new sections; others are kept.
    """
    merged = read() | sections if DATA.exists() else sections
    DATA.write_text(as_text(merged), encoding="utf-8")
    write_tables()


def as_text(sections: Mapping[str, Any]) -> str:
    """Return sections as JSON with one entry of each section a line, so that changes are readable.

    Args:
        sections: by name.

    Example:
        >>> from tools.lookup import as_text
        >>> print(as_text({"version": "1", "rows": [[1, 2], [3]]}))
        {
        "version": "1",
        "rows": [
        [1,2],
        [3]
        ]
        }
        <BLANKLINE>
    """
    return (
        "{\n"
        + ",\n".join(f"{_line(name)}: {_section(x)}" for name, x in sections.items())
        + "\n}\n"
    )


def _section(section: Any) -> str:
    if isinstance(section, list):
        return "[\n" + ",\n".join(map(_line, section)) + "\n]"
    if isinstance(section, dict):
        entries = (f"{_line(name)}: {_line(value)}" for name, value in section.items())
        return "{\n" + ",\n".join(entries) + "\n}"
    return _line(section)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def models(sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the section "models" as dictionaries, by column.

    Args:
        sections: of the file, as `read` returns them.
    """
    return [dict(zip(COLUMNS, row, strict=True)) for row in sections["models"]]


def write_tables() -> None:
    """Write the tables of docs/properties.md between their marks.

    Raises:
        ValueError: a mark is missing.
    """
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in tables(read()).items():
        marks = re.compile(
            rf"(<!-- {name}: written by tools/lookup.py -->\n).*?(<!-- end -->)", re.DOTALL
        )
        if not marks.search(page):
            raise ValueError(f"{PAGE.name} has no marks for the table {name!r}")
        text = "\n".join(lines)
        page = marks.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)  # noqa: B023
    PAGE.write_text(page, encoding="utf-8")


def tables(sections: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the lines of each table of docs/properties.md.

    Args:
        sections: of the file, as `read` returns them.
    """
    return {
        "summary": [_summary(sections)],
        "models": _models_table(sections),
        "properties": _properties_table(sections),
        "peers": _peers_table(sections),
    }


def _summary(sections: Mapping[str, Any]) -> str:
    """The results of all configurations, and the versions that they are of."""
    totals = sections["totals"]
    return (
        f"transformers {sections['transformers']}: {totals['models']:,} models of"
        f" {len(sections['holds'])} types, {totals['refused models']} of them refused as a whole;"
        f" {len(sections['properties'])} properties: {totals['right']:,} results are right"
        f" ({totals['part']:,} of these in part), {totals['refused']:,} are refused with a reason,"
        f" {totals['WRONG']} are wrong, {totals['CRASH']} end in another error. {sections['named']}"
    )


def counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count the models of some rows: all, fully offered and proved, with parts, with the stream.

    Args:
        rows: of the section "models".
    """
    rows = list(rows)
    offered = Counter(row["offered"] for row in rows)
    adapters = Counter(row["adapter"] for row in rows)
    parts = offered["full"] + offered["parts"]
    return {
        "types": len(rows),
        "full": sum(
            row["offered"] == "full" and row["proved"] and row["tried"] == CONFIGURATIONS
            for row in rows
        ),
        "parts": parts,
        "stream": parts + offered["stream"],
        "declared": adapters["declared"],
        "inferred": adapters["inferred"],
    }


def _models_table(sections: Mapping[str, Any]) -> list[str]:
    """One row for each task."""
    by_task = [
        [title, *counts(row for row in models(sections) if row["task"] == task).values()]
        for task, title in sections["tasks"].items()
    ]
    head = [
        "",
        "types",
        "full, proved",
        "at least parts",
        "at least the stream",
        "declared",
        "inferred",
    ]
    return as_table(head, by_task)


def _properties_table(sections: Mapping[str, Any]) -> list[str]:
    """One row for each property, with how many types it holds of."""
    rows = []
    for i, (name, says) in enumerate(sections["properties"]):
        signs = Counter(signs[i] for _, signs in sections["holds"].values())
        rows.append(
            [name, says, *(signs[SIGNS[verdict]] for verdict in ("right", "part", "refused"))]
        )
    return as_table(["property", "what holds", "types", "part", "refused"], rows)


def _peers_table(sections: Mapping[str, Any]) -> list[str]:
    """One row for each other library."""
    peers = sections["peers"]
    return as_table(peers["columns"], peers["totals"])


def as_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return a table as lines of Markdown.

    Args:
        head, rows: the cells.
    """
    head = list(head)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


if __name__ == "__main__":
    write_tables()
