"""Each recorded change still applies, works as it is, and touches no more files than
docs/architecture.md says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.structure import PACKAGES, ROOT, files_touched, written

FOLDER = Path(__file__).parent
CHANGES = sorted(path.stem for path in FOLDER.glob("*.patch"))


def test_the_page_names_them_and_none_touches_more() -> None:
    allowed = {name.strip("`"): files[0] for name, files in written("changes").items()}
    assert files_touched().keys() == allowed.keys()
    assert not {name: files for name, files in files_touched().items() if files > allowed[name]}


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_still_made_so(change: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for other in ("docs", "tests/adapters"):
        shutil.copytree(
            ROOT / other, tmp_path / other, ignore=shutil.ignore_patterns("__pycache__", "api")
        )
    patch = FOLDER / f"{change}.patch"
    # The folder is no repository of its own, nor part of another.
    alone = os.environ | {
        "GIT_CEILING_DIRECTORIES": str(tmp_path.parent),
        "PYTHONPATH": str(tmp_path),
    }
    applied = subprocess.run(
        ["git", "apply", str(patch)], cwd=tmp_path, env=alone, capture_output=True, text=True
    )
    assert applied.returncode == 0, f"make the change again, and keep it: {applied.stderr}"
    shown = subprocess.run(
        [sys.executable, str(FOLDER / f"{change}.py")],
        cwd=tmp_path,
        env=alone,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
