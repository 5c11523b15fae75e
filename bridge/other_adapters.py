"""Detection of AdapterHub's distribution, whose package `adapters` has the same name as ours.

Only files and their metadata are read: neither package is imported.
"""

from __future__ import annotations

import importlib.util
import warnings
from importlib import metadata
from pathlib import Path

#: The beginning of our package's first file.
OURS = '"""Declarations of the modules of a Hugging Face model'
_BOTH = (
    "AdapterHub's distribution `adapters` installs a package of the same name, and one environment"
    " cannot hold both"
)
_REPAIR = (
    "pip uninstall adapters, then, in the checkout of transformer-bridge, pip install"
    " --force-reinstall --no-deps . ; or keep them in separate environments"
)


def check_adapters() -> None:
    """Check that our own package `adapters` is importable, and warn if it overwrote another
    distribution's files.

    Raises:
        ImportError: Python finds another package, or only parts of ours.
    """
    spec = importlib.util.find_spec("adapters")
    if spec is None:
        raise ImportError(f"transformer-bridge lacks its package `adapters`. {_BOTH}: {_REPAIR}")
    if spec.origin is None:
        folders = ", ".join(dict.fromkeys(spec.submodule_search_locations or ()))
        raise ImportError(
            f"transformer-bridge's package `adapters` in {folders} has lost files, as when another"
            f" distribution that wrote over them is uninstalled. {_BOTH}: {_REPAIR}"
        )
    first = Path(spec.origin)
    ours = first.read_text(encoding="utf-8").startswith(OURS)
    other = _installed()
    version = "" if other is None else f" {other.version}"
    if not ours:
        cause = "hides transformer-bridge's own"
        if (first.parent / "points.py").exists():
            cause = "was installed over transformer-bridge's own package"
        raise ImportError(f"adapters{version} {cause}: Python finds {first}. {_BOTH}: {_REPAIR}")
    if other is not None and _is(other, first):
        warnings.warn(
            f"transformer-bridge was installed over adapters{version} in {first.parent}: that one"
            f" is broken now, and uninstalling it would break this one. {_BOTH}: {_REPAIR}",
            stacklevel=3,
        )


def _installed() -> metadata.Distribution | None:
    """Return the other distribution; None if it is not installed."""
    try:
        return metadata.distribution("adapters")
    except metadata.PackageNotFoundError:
        return None


def _is(other: metadata.Distribution, first: Path) -> bool:
    """Tell whether a distribution lists a file as its own."""
    return Path(str(other.locate_file("adapters/__init__.py"))).resolve() == first.resolve()
