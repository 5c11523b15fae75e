"""What a reader of the library pays for does not grow unsaid: each count is at most the one in
docs/architecture.md.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tools import structure

#: What `tools/structure.py` counts while it runs, in a process in which annotations are not
#: checked.
_JOURNEYS = """
import json
import torch
from tools import structure
torch.set_num_threads(1)
print(json.dumps(structure.counted()))
"""


def test_no_size_is_larger_than_the_page_says() -> None:
    allowed = structure.written("size")
    sizes = structure.sizes(structure.source_files())
    assert set(sizes) == set(allowed)
    assert not {
        name: (size, allowed[name]) for name, size in sizes.items() if size > allowed[name][0]
    }


def test_no_call_goes_through_more_than_the_page_says() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _JOURNEYS], cwd=structure.ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    counted, allowed = json.loads(run.stdout.splitlines()[-1]), structure.written("journeys")
    assert set(counted) == set(allowed)
    assert not {
        name: (way, allowed[name])
        for name, way in counted.items()
        if any(map(float.__gt__, map(float, way), allowed[name]))
    }


def test_the_page_names_every_file_with_what_it_holds() -> None:
    begin, end = structure.MARKS["files"]
    page = structure.PAGES["files"].read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    missing = [
        f"| `{file.path}` | {structure.purpose(file)} |" for file in structure.source_files()
    ]
    missing = [row for row in missing if row not in page]
    assert not missing, f"python tools/structure.py --write writes them: {missing}"


def test_the_page_has_every_shared_class_with_what_it_is() -> None:
    begin, end = structure.MARKS["classes"]
    page = structure.PAGES["classes"].read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    rows = structure.shared_classes(structure.source_files())
    missing = [row for row in rows if f"| {' | '.join(row)} |" not in page]
    assert len(rows) > 100
    assert not missing, f"python tools/structure.py --write writes them: {missing}"
