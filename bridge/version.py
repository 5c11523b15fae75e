"""The version of this library, and the oldest supported versions of others (not imported here)."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path

__version__ = "0.1.0"
#: The oldest versions that `adapters.imports` and pyproject.toml name, as docs/versions.md shows
#: them.
OLDEST = {"torch": "2.8", "transformers": "5.9"}


def check_versions() -> None:
    """Check the versions of torch and transformers before anything is imported.

    Raises:
        ImportError: torch or transformers is older than the oldest supported version.
    """
    installed: dict[str, str] = {}
    for name in OLDEST:
        # Without metadata it was built from source: `adapters.imports` checks it.
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    if any(_numbers(version) < _numbers(OLDEST[name]) for name, version in installed.items()):
        needed = [f"{name} {version}" for name, version in OLDEST.items()]
        present = [f"{name} {version}" for name, version in installed.items()]
        packages = [f"'{name}>={version}'" for name, version in OLDEST.items()]
        raise ImportError(
            f"transformer-bridge works with {' and '.join(needed)} or later, and"
            f" {' and '.join(present)} are installed: pip install {' '.join(packages)}"
        )


@cache
def built() -> str:
    """Return the version and a digest of the code that infers, proves and runs, which differs
    between commits.
    """
    digest = hashlib.sha256()
    for name in ("adapters", "bridge"):
        spec = util.find_spec(name)
        folder = Path(str(spec and spec.origin)).parent
        for file in sorted(folder.rglob("*.py")):
            path = f"{name}/{file.relative_to(folder).as_posix()}"
            digest.update(path.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:16]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
