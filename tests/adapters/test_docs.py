"""What docs/adapters.md says about the families is so."""

from __future__ import annotations

import re
from pathlib import Path

from adapters.families import CLASSES

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "adapters" / "families"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `(\w+\.py)` \|", re.MULTILINE)


def table() -> list[tuple[str, str]]:
    return ROW.findall((ROOT / "docs" / "adapters.md").read_text())


def test_the_table_holds_every_class_that_we_support() -> None:
    declared = {name: f"{family}.py" for family, names in CLASSES.items() for name in names}
    assert dict(table()) == declared
