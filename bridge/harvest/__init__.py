"""Activations over a data set, on one machine or many, resumable: `harvest` writes them,
`Activations` reads them.
"""

from __future__ import annotations

import importlib.util as _importlib

_missing = [name for name in ("pyarrow", "xxhash") if _importlib.find_spec(name) is None]
if _missing:  # before anything that imports them
    raise ImportError(
        f'bridge.harvest needs {" and ".join(_missing)}: pip install "transformer-bridge[harvest]"'
    )

from bridge.harvest.fingerprint import HarvestError, MixError, WriteError
from bridge.harvest.harvest import harvest
from bridge.harvest.options import Project, Reduction, TopK, TopPositions
from bridge.harvest.packing import Files
from bridge.harvest.reading import (
    Activations,
    ActivationsDataset,
    HarvestCheck,
    Share,
    Statistics,
    check,
)
from bridge.harvest.rows import Harvested, Progress

__all__ = [
    "Activations",
    "ActivationsDataset",
    "Files",
    "HarvestCheck",
    "HarvestError",
    "Harvested",
    "MixError",
    "Progress",
    "Project",
    "Reduction",
    "Share",
    "Statistics",
    "TopK",
    "TopPositions",
    "WriteError",
    "check",
    "harvest",
]
