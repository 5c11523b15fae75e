"""The version of this library, and the oldest versions of others that it works with. Nothing of them is imported."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path

__version__ = "0.1.0"
#: As docs/versions.md shows them: those that `adapters.imports` and pyproject.toml name.
OLDEST = {"torch": "2.8", "transformers": "5.9"}


def check_versions() -> None:
    """Refuses what nothing here works with, before anything is imported.

    Raises:
        ImportError: torch or transformers is older than the oldest that works.
    """
    found: dict[str, str] = {}
    for name in OLDEST:
        with suppress(metadata.PackageNotFoundError):  # built from source: `adapters.imports` looks at it
            found[name] = metadata.version(name)
    if any(_numbers(version) < _numbers(OLDEST[name]) for name, version in found.items()):
        works, there = (" and ".join(f"{name} {version}" for name, version in each.items()) for each in (OLDEST, found))
        asked = " ".join(f"'{name}>={version}'" for name, version in OLDEST.items())
        raise ImportError(
            f"transformer-bridge works with {works} or later, and {there} are installed: pip install {asked}"
        )


@cache
def built() -> str:
    """The version, and a digest of the code that infers, proves and runs: another commit has another."""
    found = hashlib.sha256()
    for name in ("adapters", "bridge"):
        spec = util.find_spec(name)
        folder = Path(str(spec and spec.origin)).parent
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{name}/{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return f"{__version__}+{found.hexdigest()[:16]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
