"""What docs/adapters.md says about the families is so."""

from __future__ import annotations

import re
from pathlib import Path

from adapters.families import CLASSES

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "adapters" / "families"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `(\w+\.py)` \| (\d+) \|", re.MULTILINE)


def table() -> list[tuple[str, str, int]]:
    rows = ROW.findall((ROOT / "docs" / "adapters.md").read_text())
    return [(name, file, int(lines)) for name, file, lines in rows]


def test_the_table_holds_every_class_that_we_support() -> None:
    declared = {name: f"{family}.py" for family, names in CLASSES.items() for name in names}
    assert {name: file for name, file, _ in table()} == declared


def test_the_table_counts_the_lines_of_every_file() -> None:
    counted = {path.name: len(path.read_text().splitlines()) for path in FAMILIES.glob("*.py")}
    del counted["__init__.py"]
    assert {file: lines for _, file, lines in table()} == counted
