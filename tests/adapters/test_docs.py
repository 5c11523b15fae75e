"""What docs/adapters.md says about the families is so."""

from __future__ import annotations

import re
from pathlib import Path

from adapters.families import CLASSES
from tools.structure import vocabulary

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "adapters" / "families"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `(\w+\.py)` \|", re.MULTILINE)


def table() -> list[tuple[str, str]]:
    return ROW.findall((ROOT / "docs" / "adapters.md").read_text())


def test_the_table_holds_every_class_that_we_support() -> None:
    rows = ((name, f"{file}.py") for file, found in CLASSES.items() for names in found.values() for name in names)
    declared = dict(rows)
    assert dict(table()) == declared


def test_every_field_of_the_vocabulary_is_in_the_table_of_questions() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text()
    questions = text.split("| question | where it goes |")[1].split("\n\n")[0]
    said = set(re.findall(r"`(\w+\.\w+)`", questions)) - {"t5.py", "gpt_oss.py", "adapters.norms"}
    assert said == {f"{noun}.{field}" for noun, names in vocabulary().items() for field in names}


def test_the_vocabulary_of_declarations_does_not_grow() -> None:
    """A new odd model is a new combination of what is there; a field more has to replace one."""
    assert sum(map(len, vocabulary().values())) <= 110
