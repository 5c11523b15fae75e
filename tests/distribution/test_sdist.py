"""What is published holds what is in the checkout, and the package is made of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("adapters/", "bridge/", "weight_processing/")


def build(kind: str, folder: Path, out: Path) -> Path:
    """As `python -m build --no-isolation` does it."""
    code = f"import setuptools.build_meta as backend, sys; backend.build_{kind}(sys.argv[1])"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


def of_packages(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith(PACKAGES) and not name.endswith("/")}


def test_the_sdist_holds_the_checkout_and_makes_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout, which the sdist could be compared with")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    files = {name for name in listed if name and (ROOT / name).is_file()}
    copy = tmp_path / "checkout"
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)

    with tarfile.open(build("sdist", copy, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert not files - there
    assert {name for name in there - files if ".egg-info" not in name} == {"PKG-INFO", "setup.cfg"}

    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel")) as wheel:
        assert of_packages(wheel.namelist()) == of_packages(files)
