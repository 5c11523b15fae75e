"""Interventions as data: operations on activations that are hook functions, and can be saved."""

from bridge.interventions.files import InterventionsFileError, OtherModelError
from bridge.interventions.interventions import Interventions, load
from bridge.interventions.operations import (
    OPERATIONS,
    Add,
    AddScaled,
    Cap,
    Clamp,
    Condition,
    Mean,
    Operation,
    Probe,
    ProjectOnto,
    ProjectOut,
    Replace,
    Scale,
    Set,
    Swap,
    Zero,
)
from bridge.interventions.touching import Touching

__all__ = [
    "OPERATIONS",
    "Add",
    "AddScaled",
    "Cap",
    "Clamp",
    "Condition",
    "Interventions",
    "InterventionsFileError",
    "Mean",
    "Operation",
    "OtherModelError",
    "Probe",
    "ProjectOnto",
    "ProjectOut",
    "Replace",
    "Scale",
    "Set",
    "Swap",
    "Touching",
    "Zero",
    "load",
]
