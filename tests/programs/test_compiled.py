"""Runs the tests of compiled programs where nothing checks types: what does cannot be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_compiled_programs():
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            *(f"tests/{room}/compiled.py" for room in ("programs", "patching")),
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"UNCHECKED": "1"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout[-6000:] + made.stderr[-2000:]
