"""Where models and their layers go."""

from __future__ import annotations

from typing import Any

import torch

from bridge.legacy.devices import get_device, warn_if_mps

__all__ = [
    "AvailableDeviceMemory", "calculate_available_device_cuda_memory",
    "determine_available_memory_for_available_devices", "get_best_available_cuda_device", "get_best_available_device",
    "get_device", "get_device_for_block_index", "move_to_and_update_config", "sort_devices_based_on_available_memory",
    "warn_if_mps",
]  # fmt: skip

#: Pairs of a GPU's number and its free bytes.
AvailableDeviceMemory = list[tuple[int, int]]


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
