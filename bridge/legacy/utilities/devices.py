"""Which device a model goes to when nobody says, and which GPU has room."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

#: Pairs of a GPU's number and its free bytes.
AvailableDeviceMemory = list[tuple[int, int]]


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


def calculate_available_device_cuda_memory(i: int) -> int:
    """How many bytes of a GPU this process could still take: all but what it has taken."""
    return torch.cuda.get_device_properties(i).total_memory - torch.cuda.memory_allocated(i)


def determine_available_memory_for_available_devices(max_devices: int) -> AvailableDeviceMemory:
    """The first GPUs, each with its free bytes."""
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(max_devices)]


def sort_devices_based_on_available_memory(devices: AvailableDeviceMemory) -> AvailableDeviceMemory:
    """The same GPUs, the emptiest first."""
    return sorted(devices, key=lambda device: device[1], reverse=True)


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with the most free memory."""
    found = determine_available_memory_for_available_devices(
        torch.cuda.device_count() if max_devices is None else max_devices
    )
    if not found:
        raise OSError("there is no CUDA device")
    return torch.device("cuda", sort_devices_based_on_available_memory(found)[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """The device of a configuration; the emptiest GPU where it is for several."""
    device = torch.device(cfg.device)
    if device.type == "cuda" and (cfg.n_devices or 1) > 1:
        return get_best_available_cuda_device(cfg.n_devices)
    return device


def get_device_for_block_index(index: int, cfg: Any, device: torch.device | str | None = None) -> torch.device:
    """The device of a block when all devices get the same number of blocks, one after another.

    The map of a model that Hugging Face spread is its own: ``model.blocks[index].attn.W_Q.device`` reads it.
    """
    first = torch.device(cfg.device if device is None else device)
    if first.type == "cpu":
        return first
    each = max(1, cfg.n_layers // (cfg.n_devices or 1))
    return torch.device(first.type, (first.index or 0) + index // each)


def move_to_and_update_config(
    model: Any, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True
) -> Any:
    """Moves a model, or changes the type of its weights: ``model.to``, after which its `cfg` says so by itself."""
    return model.to(device_or_dtype)
