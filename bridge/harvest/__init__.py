"""Activations over a data set, on one machine or many, resumable: `harvest` writes them, `Activations` reads them."""

from __future__ import annotations

import importlib.util

_NEEDED = [name for name in ("pyarrow", "xxhash") if importlib.util.find_spec(name) is None]
if _NEEDED:
    raise ImportError(f'bridge.harvest needs {" and ".join(_NEEDED)}: pip install "transformer-bridge[harvest]"')

from bridge.harvest.errors import HarvestError, MixError, WriteError
from bridge.harvest.progress import Progress, Report
from bridge.harvest.reductions import Project, Reduction, TopK, TopPositions
from bridge.harvest.run import harvest
from bridge.harvest.sources import Files

__all__ = [
    "Files",
    "HarvestError",
    "MixError",
    "Progress",
    "Project",
    "Reduction",
    "Report",
    "TopK",
    "TopPositions",
    "WriteError",
    "harvest",
]
