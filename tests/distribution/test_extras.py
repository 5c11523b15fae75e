"""Each extra alone: with what the other extras bring out of reach, the room that it is for
works.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distribution.uses import BRIDGE, COMMANDS, USES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

FIRST = """
import sys
from importlib.machinery import PathFinder

class WithinReach(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.split(".")[0] in {blocked!r} else super().find_spec(fullname, path, target)

sys.meta_path[:] = [WithinReach if finder is PathFinder else finder for finder in sys.meta_path]
"""
#: Those that `make test` installs together.
TOGETHER = ("", "pictures", "harvest")


def brought(extra: str) -> set[str]:
    """The distributions that an extra names, also through another extra of ours."""
    found: set[str] = set()
    for each in map(Requirement, EXTRAS.get(extra, PROJECT["dependencies"])):
        inner = each.extras if each.name == PROJECT["name"] else set()
        found |= set().union(*map(brought, inner)) if inner else {canonicalize_name(each.name)}
    return found


def blocked(extra: str) -> set[str]:
    """The packages that only other extras bring."""
    own = brought(extra) | brought("")
    others = set().union(*map(brought, EXTRAS)) - own
    # What transformers imports of these where it finds them is not ours to take away.
    others -= {"accelerate", "scikit-learn", "psutil", "sentencepiece", "protobuf", "gguf"}
    where = packages_distributions()
    return {
        package
        for package, names in where.items()
        if {canonicalize_name(each) for each in names} & others
    }


@pytest.mark.parametrize("extra", TOGETHER)
def test_an_extra_alone(extra: str, tmp_path: Path) -> None:
    if absent := [name for name in ("altair", "pyarrow") if find_spec(name) is None]:
        pytest.skip(
            f"{', '.join(absent)} is not installed, so there is nothing to put out of reach"
        )
    away = blocked(extra)
    assert (
        {"pytest", "beartype"} <= away
        and ("altair" in away) == (extra != "pictures")
        and ("pyarrow" in away) == (extra != "harvest")
    )
    code = FIRST.format(blocked=away) + BRIDGE + USES[extra]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("use", "needs"), [("pictures", "altair"), ("harvest", "pyarrow")])
def test_without_its_extra_a_room_says_which_it_needs(use: str, needs: str, tmp_path: Path) -> None:
    code = FIRST.format(blocked=blocked("")) + f"import bridge.{use}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=_environment(),
    )
    assert done.returncode and f"transformer-bridge[{use}]" in done.stderr and needs in done.stderr


def test_each_extra_was_installed_alone_and_used() -> None:
    """`make extras` installs each, which takes half an hour; its table has a row for each, and in
    none what failed.
    """
    assert set(USES) | set(COMMANDS) == {"", *EXTRAS} and not set(USES) & set(COMMANDS)
    table = (
        (ROOT / "benchmarks" / "VERSIONS.md")
        .read_text()
        .partition("## Installed from the wheel")[2]
    )
    rows = dict(re.findall(r"^\| (\w+) \| 5[\d.]+ \|.*\| ([\w ]+) \|$", table, re.MULTILINE))
    assert set(rows) == {"none", *EXTRAS} and set(rows.values()) <= {"works", "not measured"}
    assert re.search(
        r"^\| none \| 5\.15\.\d+ \|.*the README's first example \| works \|$", table, re.MULTILINE
    )
