"""What docs/adapters.md says about the families is so."""

from __future__ import annotations

import re
from pathlib import Path

from adapters import registry, supported

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "adapters" / "families"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `(\w+\.py)` \| (\d+) \|", re.MULTILINE)


def table() -> list[tuple[str, str, int]]:
    rows = ROW.findall((ROOT / "docs" / "adapters.md").read_text())
    return [(name, file, int(lines)) for name, file, lines in rows]


def test_the_table_holds_every_class_that_we_support() -> None:
    supported()
    ours = {name for name, declare in registry._REGISTRY.items() if declare.__module__.startswith("adapters.families")}
    assert {name for name, _, _ in table()} == ours
    for name, file, _ in table():
        assert registry._REGISTRY[name].__module__ == f"adapters.families.{file.removesuffix('.py')}"


def test_the_table_counts_the_lines_of_every_file() -> None:
    counted = {path.name: len(path.read_text().splitlines()) for path in FAMILIES.glob("*.py")}
    del counted["__init__.py"]
    assert {file: lines for _, file, lines in table()} == counted
