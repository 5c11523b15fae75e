"""Interventions as data: operations on activations that are hook functions, and can be saved."""

from bridge.interventions.files import OPERATIONS
from bridge.interventions.interventions import Interventions, load
from bridge.interventions.operations import (
    Add,
    AddScaled,
    Cap,
    Clamp,
    Condition,
    Mean,
    Operation,
    ProjectOnto,
    ProjectOut,
    Replace,
    Scale,
    Set,
    Swap,
    Zero,
)
from bridge.interventions.probes import (
    FittedProbe,
    Probe,
    ProbeAgreement,
    ProbeReading,
    ProbeReport,
)
from bridge.interventions.stored import InterventionsFileError, OtherModelError
from bridge.interventions.touching import Touching

__all__ = [
    "OPERATIONS",
    "Add",
    "AddScaled",
    "Cap",
    "Clamp",
    "Condition",
    "FittedProbe",
    "Interventions",
    "InterventionsFileError",
    "Mean",
    "Operation",
    "OtherModelError",
    "Probe",
    "ProbeAgreement",
    "ProbeReading",
    "ProbeReport",
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
