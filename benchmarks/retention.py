"""What `run_with_cache` of everything costs, taken apart: the run, and the new memory that what is kept needs.

    python benchmarks/retention.py

A plain run gets back the memory that it has just freed; what is kept cannot be had back, so that the kernel has to find
new pages. How much of the time that is shows when the C library's allocator holds on to freed memory (glibc:
``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``): everything is done once as it comes, and once so. The floor is
beside it: plain torch hooks at the same places, that only keep what they are given, without any of our code. Ratios to
eager attention with `output_attentions`, alternated, medians; page faults, and megabytes that the cache keeps alive.
"""

from __future__ import annotations

import copy
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from overhead import MODELS

from adapters.views import Deferred
from bridge import TransformerBridge

KEEP = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**28)}


def kept_megabytes(cache: Any) -> float:
    """The memory that a cache keeps alive."""
    sizes = {}
    for value in cache._values.values():
        tensors = [value]
        if isinstance(value, Deferred):
            held = getattr(value, "attention", None)
            tensors = [value.x] if held is None else [held.query, held.key]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) / 1e6


def measure(jobs: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Prints each job's median time, its ratio to the first, and its page faults."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    faults: dict[str, list[int]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(rounds):
        for name, job in jobs.items():
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
            faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    base = statistics.median(next(iter(times.values())))
    for name in jobs:
        median = statistics.median(times[name])
        count = statistics.median(faults[name])
        print(f"  {name:<50} {median * 1e3:9.2f} ms  {median / base:6.3f}  {count:8.0f} faults", flush=True)


def one(index: int, shape: tuple[int, int]) -> None:
    """The figures of one model and batch."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    name, (cls, config, _) = list(MODELS.items())[index]
    plain = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    model = cls._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    bridge = TransformerBridge(model)
    tokens = torch.randint(0, config.vocab_size, shape)
    sites = {hook.point.site for hook in bridge.hook_dict.values() if hook.point.group == "standard"}

    def bare() -> None:
        kept: list[Any] = []
        handles = []
        for site in sites:
            if site.kind == "input":
                handles.append(model.get_submodule(site.path).register_forward_pre_hook(lambda m, a: kept.append(a)))
            elif site.kind == "output":
                handles.append(model.get_submodule(site.path).register_forward_hook(lambda m, a, o: kept.append(o)))
        model(tokens)
        for handle in handles:
            handle.remove()

    memory = "as it comes" if "MALLOC_TRIM_THRESHOLD_" not in os.environ else "held on to by the allocator"
    size = kept_megabytes(bridge.run_with_cache(tokens)[1])
    print(f"\n{name}, batch {shape[0]}x{shape[1]}, memory {memory}; a cache of everything keeps {size:.0f} MB")
    jobs = {
        "hf eager, output_attentions": lambda: plain(tokens, output_attentions=True),
        "hf, plain torch hooks at the same places": bare,
        "run_with_cache, everything": lambda: bridge.run_with_cache(tokens),
    }
    measure(jobs, 15 if shape[0] == 1 else 5)


def main() -> None:
    """Each model, batch and allocator in a process of its own."""
    if len(sys.argv) > 1:
        index, batch, positions = map(int, sys.argv[1:])
        one(index, (batch, positions))
        return
    for index in range(2):
        for shape in ("1 128", "4 512"):
            for extra in ({}, KEEP):
                subprocess.run(
                    [sys.executable, __file__, str(index), *shape.split()], check=True, env=os.environ | extra
                )


if __name__ == "__main__":
    main()
