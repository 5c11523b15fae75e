"""Each extra alone: with what the other extras bring out of reach, the room that it is for works."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
from bridge import TransformerBridge
bridge = TransformerBridge.boot_embedded()
"""
USES = {
    "": "bridge.generate('Mary and', max_new_tokens=2, do_sample=False, verbose=False); bridge.process_weights()",
    "pictures": "from bridge import pictures; lens = bridge.lens('Mary and')\n"
    "pictures.logit_lens(lens.stack(), bridge.to_str_tokens('Mary and'), bridge).save('lens.svg')",
    "harvest": "from bridge.harvest import Activations, harvest\n"
    "harvest(bridge, ['Mary and John'], hook_points=['blocks.1.hook_resid_post'], out='out', context_size=4)\n"
    "assert len(Activations('out'))",
}


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
    return {package for package, names in where.items() if {canonicalize_name(each) for each in names} & others}


@pytest.mark.parametrize("extra", USES)
def test_an_extra_alone(extra: str, tmp_path: Path) -> None:
    away = blocked(extra)
    assert (
        "pytest" in away and ("altair" in away) == (extra != "pictures") and ("pyarrow" in away) == (extra != "harvest")
    )
    code = FIRST.format(blocked=away) + USES[extra]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=_environment()
    )
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("use", "needs"), [("pictures", "altair"), ("harvest", "pyarrow")])
def test_without_its_extra_a_room_says_which_it_needs(use: str, needs: str, tmp_path: Path) -> None:
    code = FIRST.format(blocked=blocked("")) + f"import bridge.{use}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=_environment()
    )
    assert done.returncode and f"transformer-bridge[{use}]" in done.stderr and needs in done.stderr
