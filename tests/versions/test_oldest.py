"""What is too old is refused in one sentence, as it is imported."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import transformers

import adapters.imports
from bridge.version import OLDEST

ROOT = Path(__file__).parents[2]


def test_all_name_the_same() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {
        need.split(">=")[0]: need.split(">=")[1].split(",")[0]
        for need in asked
        if need.startswith(tuple(OLDEST))
    }
    assert found == OLDEST == adapters.imports._OLDEST


@pytest.mark.parametrize(
    ("name", "version"), [("transformers", "4.57.6"), ("transformers", "5.8.1"), ("torch", "2.7.1")]
)
@pytest.mark.parametrize("module", ["bridge", "bridge.circuits"])
def test_import_bridge(tmp_path: Path, name: str, version: str, module: str) -> None:
    """With metadata of an older one before that of the installed: nothing of it is imported."""
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ImportError: transformer-bridge works with torch 2.8 and transformers 5.9 or later, and"
        " torch "
    )
    assert f"{name} {version}" in last and last.endswith(
        "pip install 'torch>=2.8' 'transformers>=5.9'"
    )
    assert "RuntimeError" not in done.stderr


@pytest.mark.parametrize(
    ("library", "version"), [(transformers, "4.57.6"), (torch, "2.7.1+cu126"), (torch, "2.8.0a0")]
)
def test_import_adapters(monkeypatch: pytest.MonkeyPatch, library: object, version: str) -> None:
    """Alone, or where there is no metadata."""
    monkeypatch.setattr(library, "__version__", version)
    check = adapters.imports._check_versions
    if version == "2.8.0a0":
        check()  # what comes before a release has what the release has
        return
    with pytest.raises(
        ImportError,
        match=r"works with torch 2.8 and transformers 5.9 or later, and .* are installed",
    ):
        check()


def test_what_needs_a_newer_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(
        ImportError, match=r"exporting a program needs torch 2.11 or later, and 2.10.0 is installed"
    ):
        importlib.import_module("adapters.imports").get_exporter_class  # noqa: B018
