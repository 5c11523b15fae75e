"""Runs the tests of compiled and exported programs where nothing checks types: what does cannot be
traced.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: torch's own format; `make export` runs all.
EXPORTED = (
    "test_logits_patterns_and_streams_with_and_without_interventions[dynamo-gpt2]",
    "test_the_body_of_an_edit_is_exported",
)


@pytest.mark.parametrize(
    "files",
    [
        ["programs/compiled.py"],
        ["programs/shared.py"],
        ["programs/changed.py"],
        [f"programs/exported.py::{name}" for name in EXPORTED],
    ],
    ids=["compiled", "shared", "changed", "exported"],
)
def test_compiled_and_exported_programs(files: list[str]):
    made = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *(f"tests/{file}" for file in files)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"UNCHECKED": "1"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout[-6000:] + made.stderr[-2000:]
