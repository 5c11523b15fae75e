"""Activations over a data set, on one machine or many, resumable: `harvest` writes them, `Activations` reads them."""

from __future__ import annotations

from bridge.harvest import needed as _needed  # noqa: F401 - first: it says what is not installed
from bridge.harvest.fingerprint import HarvestError, MixError, WriteError
from bridge.harvest.harvest import harvest
from bridge.harvest.options import Project, Reduction, TopK, TopPositions
from bridge.harvest.packing import Files
from bridge.harvest.reading import Activations, ActivationsDataset, Check, Share, Statistics, check
from bridge.harvest.rows import Progress, Report

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
