"""Runs the tests of compiled and exported programs where nothing checks types: what does cannot be traced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: torch's own format; `make export` runs all.
EXPORTED = (
    "test_logits_patterns_and_streams_with_and_without_interventions[dynamo-gpt2]",
    "test_the_body_of_an_edit_is_exported",
)


def test_compiled_and_exported_programs():
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            *(f"tests/{file}.py" for file in ("programs/compiled", "programs/shared", "patching/compiled")),
            *(f"tests/programs/exported.py::{name}" for name in EXPORTED),
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"UNCHECKED": "1"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout[-6000:] + made.stderr[-2000:]
