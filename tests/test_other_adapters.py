"""AdapterHub's `adapters`, installed before or after ours: what `import bridge` says, having
imported nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THEIRS = "__version__ = '1.3.0'\nraise RuntimeError('imported')\n"


def ours(site: Path) -> None:
    """Installs what of ours is needed to begin an import."""
    for path in (
        "bridge/__init__.py",
        "bridge/other_adapters.py",
        "bridge/version.py",
        "adapters/__init__.py",
    ):
        (site / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, site / path)
    (site / "adapters" / "points.py").write_text("raise RuntimeError('imported')")


def theirs(site: Path) -> None:
    """Installs AdapterHub's, as pip does: what is there is written over."""
    (site / "adapters").mkdir(exist_ok=True)
    (site / "adapters" / "__init__.py").write_text(THEIRS)
    (site / "adapters-1.3.0.dist-info").mkdir()
    (site / "adapters-1.3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: adapters\nVersion: 1.3.0\n"
    )
    (site / "adapters-1.3.0.dist-info" / "RECORD").write_text("adapters/__init__.py,,\n")


def uninstall_theirs(site: Path) -> None:
    """Uninstalls AdapterHub's, as pip does: all files that it lists."""
    (site / "adapters" / "__init__.py").unlink()
    shutil.rmtree(site / "adapters-1.3.0.dist-info")


AFTER = (
    "adapters 1.3.0 was installed over transformer-bridge's own package: Python finds"
    " {site}/adapters/__init__.py."
)
REPAIR = (
    "pip uninstall adapters, then, in the checkout of transformer-bridge, pip install"
    " --force-reinstall --no-deps . ; or keep them in"
)


@pytest.mark.parametrize(
    ("steps", "status", "said"),
    [
        ([ours], 0, ""),
        ([ours, theirs], 1, AFTER),
        (
            [theirs, ours],
            0,
            (
                "transformer-bridge was installed over adapters 1.3.0 in {site}/adapters: that one"
                " is broken"
            ),
        ),
        (
            [ours, theirs, uninstall_theirs],
            1,
            "transformer-bridge's package `adapters` in {site}/adapters has lost files",
        ),
        ([ours, theirs, uninstall_theirs, ours], 0, ""),
    ],
    ids=["alone", "theirs after", "theirs before", "theirs uninstalled", "repaired"],
)
def test_every_order_of_installation(tmp_path, steps, status, said):
    for step in steps:
        step(tmp_path)
    out = _import(tmp_path, tmp_path)
    assert out.returncode == status, out.stderr
    assert said.format(site=tmp_path) in out.stderr and (REPAIR in out.stderr) == bool(said)
    assert "RuntimeError" not in out.stderr  # nothing of either package was imported


def test_another_folder_hides_ours(tmp_path):
    for name, install in (("a", theirs), ("b", ours)):
        (tmp_path / name).mkdir()
        install(tmp_path / name)
    out = _import(tmp_path / "a", tmp_path / "b")
    assert out.returncode
    assert (
        f"adapters 1.3.0 hides transformer-bridge's own: Python finds {tmp_path}/a/adapters"
        in out.stderr
    )
    out = _import(
        tmp_path / "b", tmp_path / "a"
    )  # a checkout before what is installed: neither is damaged
    assert (out.returncode, out.stderr) == (0, "")


def _import(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", "import bridge"],
        capture_output=True,
        text=True,
        cwd=paths[0],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
