"""Another distribution, AdapterHub's `adapters`, installs a package of the same name as one of ours.

What is looked at here is files and their metadata: nothing of either package is imported.
"""

from __future__ import annotations

import importlib.util
import warnings
from importlib import metadata
from pathlib import Path

#: What our package's first file begins with.
OURS = '"""Which module of a Hugging Face model plays which part'
_BOTH = "AdapterHub's distribution `adapters` installs a package of the same name, and one environment cannot hold both"
_REPAIR = (
    "pip uninstall adapters, then, in the checkout of transformer-bridge, pip install --force-reinstall --no-deps . ; "
    "or keep them in separate environments"
)


def check_adapters() -> None:
    """Refuses to go on without our own package `adapters`, and warns where it lies over another's files.

    Raises:
        ImportError: Python finds another package, or parts of ours.
    """
    spec = importlib.util.find_spec("adapters")
    if spec is None:
        raise ImportError(f"transformer-bridge lacks its package `adapters`. {_BOTH}: {_REPAIR}")
    if spec.origin is None:
        found = ", ".join(dict.fromkeys(spec.submodule_search_locations or ()))
        raise ImportError(
            f"transformer-bridge's package `adapters` in {found} has lost files, as when another distribution that "
            f"wrote over them is uninstalled. {_BOTH}: {_REPAIR}"
        )
    first = Path(spec.origin)
    whole = first.read_text(encoding="utf-8").startswith(OURS)
    other = _installed()
    if whole and (other is None or not _is(other, first)):
        return
    version = "" if other is None else f" {other.version}"
    if whole:
        warnings.warn(
            f"transformer-bridge was installed over adapters{version} in {first.parent}: that one is broken now, and "
            f"uninstalling it would break this one. {_BOTH}: {_REPAIR}",
            stacklevel=3,
        )
        return
    mixed = (first.parent / "points.py").exists()
    happened = "was installed over transformer-bridge's own package" if mixed else "hides transformer-bridge's own"
    raise ImportError(f"adapters{version} {happened}: Python finds {first}. {_BOTH}: {_REPAIR}")


def _installed() -> metadata.Distribution | None:
    """The other distribution, where it is installed."""
    try:
        return metadata.distribution("adapters")
    except metadata.PackageNotFoundError:
        return None


def _is(other: metadata.Distribution, first: Path) -> bool:
    """Whether a distribution says that a file is its own."""
    return Path(str(other.locate_file("adapters/__init__.py"))).resolve() == first.resolve()
