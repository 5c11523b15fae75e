"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """The bytes that are free on a device now.

    Args:
        device: the device.

    Example:
        >>> import torch
        >>> from bridge.run.memory import free_memory
        >>> free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    facts = Path("/proc/meminfo")
    if facts.exists():
        lines = dict(line.split(":", 1) for line in facts.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
