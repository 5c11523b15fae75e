"""What this room needs in addition to the package's own dependencies. It is imported first, to say so."""

from __future__ import annotations

import importlib.util


def missing(names: tuple[str, ...] = ("pyarrow", "xxhash")) -> list[str]:
    """Those of the packages that are not installed.

    Args:
        names: the packages.
    """
    return [name for name in names if importlib.util.find_spec(name) is None]


if missing():
    raise ImportError(f'bridge.harvest needs {" and ".join(missing())}: pip install "transformer-bridge[harvest]"')
