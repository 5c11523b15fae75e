"""Which device a model goes to when nobody says."""

from __future__ import annotations

import functools
import os
import warnings

import torch


def get_device() -> torch.device:
    """The first accelerator, or the CPU. Apple's is only chosen where TRANSFORMERLENS_ALLOW_MPS=1 is set."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available() and _mps_is_wanted():
        return torch.device("mps")
    return torch.device("cpu")


def warn_if_mps(device: torch.device | str) -> None:
    """Warns, once, that Apple's GPU may compute wrong values, unless TRANSFORMERLENS_ALLOW_MPS=1 is set."""
    if torch.device(device).type == "mps" and not _mps_is_wanted():
        _warn()


def _mps_is_wanted() -> bool:
    return os.environ.get("TRANSFORMERLENS_ALLOW_MPS") == "1"


@functools.cache
def _warn() -> None:
    warnings.warn(
        "the MPS backend may produce silently incorrect results (Apple's GPU): compare with the CPU. "
        "TRANSFORMERLENS_ALLOW_MPS=1 turns this warning off",
        stacklevel=3,
    )
