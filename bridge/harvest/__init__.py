"""Activations over a data set, on one machine or many, resumable: `harvest` writes them, `Activations` reads them."""

from __future__ import annotations

from bridge.harvest import needed as _needed  # noqa: F401 - first: it says what is not installed
from bridge.harvest.errors import HarvestError, MixError, WriteError
from bridge.harvest.progress import Progress, Report
from bridge.harvest.reading.activations import Activations, ActivationsDataset
from bridge.harvest.reading.check import Check, check
from bridge.harvest.reading.shuffle import Share
from bridge.harvest.reading.statistics import Statistics
from bridge.harvest.reductions import Project, Reduction, TopK, TopPositions
from bridge.harvest.run import harvest
from bridge.harvest.sources import Files

__all__ = [
    "Activations",
    "ActivationsDataset",
    "Check",
    "Files",
    "HarvestError",
    "MixError",
    "Progress",
    "Project",
    "Reduction",
    "Report",
    "Share",
    "Statistics",
    "TopK",
    "TopPositions",
    "WriteError",
    "check",
    "harvest",
]
