"""Which device a model goes to when nobody says."""

from __future__ import annotations

import os

import torch


def get_device() -> torch.device:
    """The first accelerator, or the CPU. Apple's is only chosen where TRANSFORMERLENS_ALLOW_MPS=1 is set.

    Example:
        >>> from bridge.legacy.utils import get_device
        >>> get_device().type in ("cpu", "cuda", "mps")
        True
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available() and os.environ.get("TRANSFORMERLENS_ALLOW_MPS") == "1":
        return torch.device("mps")
    return torch.device("cpu")
