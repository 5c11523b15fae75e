"""What `run_with_cache` of everything costs, taken apart: the run, and the new memory that what is kept needs.

    [THREADS=N] python benchmarks/retention.py

A plain run gets back the memory that it has just freed; what is kept cannot be had back, so that the kernel has to find
new pages. How much of the time that is shows when the C library's allocator holds on to freed memory (glibc:
``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``): everything is done once as it comes, and once so. The floor is
beside it: plain torch hooks at the same places, found beforehand, that only keep what they are given, without any of
our code. Ratios to eager attention with `output_attentions`, alternated, medians and between which values half of the
rounds lie; page faults, and megabytes that the cache keeps alive. With gradients, ratios are to the floor: hooks that
keep each tensor and its gradient.
"""

from __future__ import annotations

import copy
import os
import pathlib
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from alternated import alternated
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
    """Prints each job's median time, its ratio to the first with its spread, and its page faults."""
    for name, timed in alternated(jobs, rounds).items():
        counts = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            jobs.get(name, next(iter(jobs.values())))()
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        print(f"  {name:<42} {timed}  {statistics.median(counts):8.0f} faults", flush=True)


Hooks = list[tuple[dict[int, Any], Callable[..., None]]]


def places(model: Any, bridge: TransformerBridge, kept: list[Any], gradients: bool = False) -> Hooks:
    """Where the floor's hooks stand, and they: found beforehand, as a bridge finds its own once.

    Args:
        model: the Hugging Face model.
        bridge: its bridge.
        kept: where the hooks put what they are given.
        gradients: and the gradient of each tensor of floating-point numbers, too.
    """

    def keep(x: Any) -> None:
        kept.append(x)
        first = x[0] if type(x) is tuple and x else x
        if gradients and isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(kept.append)

    found: Hooks = []
    for site in {hook.point.site for hook in bridge.hook_dict.values() if hook.point.group == "standard"}:
        if site.kind == "input":
            found.append((model.get_submodule(site.path)._forward_pre_hooks, lambda m, a: keep(a)))
        elif site.kind == "output":
            found.append((model.get_submodule(site.path)._forward_hooks, lambda m, a, o: keep(o)))
    return found


def with_hooks(hooks: Hooks, run: Callable[[], Any]) -> None:
    """A run with the hooks put into torch's own dictionaries: torch's handles would cost more than the hooks."""
    for number, (where, hook) in enumerate(hooks):
        where[-1 - number] = hook
    try:
        run()
    finally:
        for number, (where, _) in enumerate(hooks):
            del where[-1 - number]


def one(index: int, shape: tuple[int, int]) -> None:
    """The figures of one model and batch."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    name, (cls, config, _) = list(MODELS.items())[index]
    plain = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    model = cls._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    bridge = TransformerBridge(model)
    tokens = torch.randint(0, config.vocab_size, shape)
    kept: list[Any] = []
    hooks, both = places(model, bridge, kept), places(model, bridge, kept, gradients=True)

    def floor() -> None:
        with_hooks(hooks, lambda: model(tokens))
        kept.clear()

    def loss() -> Any:
        return model(tokens, labels=tokens).loss

    def plain_backward() -> None:
        with torch.enable_grad():
            loss().backward()
        model.zero_grad()

    def floor_backward() -> None:
        with torch.enable_grad():
            with_hooks(both, lambda: loss().backward())
        kept.clear()
        model.zero_grad()

    # Neither keeps scores and patterns, which are of the model's own making in no kernel but the eager one.
    names = [name for name, hook in bridge.hook_dict.items() if hook.point.group == "standard"]
    names = [name for name in names if not name.endswith(("hook_attn_scores", "hook_pattern"))]

    def ours_backward(names: list[str] | None) -> None:
        with torch.enable_grad():
            bridge.run_with_cache(tokens, names_filter=names, return_type="loss", incl_bwd=True)
        model.zero_grad()

    memory = "as it comes" if "MALLOC_TRIM_THRESHOLD_" not in os.environ else "held on to by the allocator"
    size = kept_megabytes(bridge.run_with_cache(tokens)[1])
    print(f"\n{name}, batch {shape[0]}x{shape[1]}, memory {memory}; a cache of everything keeps {size:.0f} MB")
    jobs: dict[str, Callable[[], Any]] = {
        "hf eager, output_attentions": lambda: plain(tokens, output_attentions=True),
        "hf, as loaded": lambda: model(tokens),
        "hf, plain hooks at the same places (floor)": floor,
        "run_with_cache, everything": lambda: bridge.run_with_cache(tokens),
    }
    rounds = 60 if name.startswith("tiny") else 15 if shape[0] == 1 else 5
    measure(jobs, rounds)
    print("  with gradients:")
    backward: dict[str, Callable[[], Any]] = {
        "hf, plain hooks at the same places (floor)": floor_backward,
        "hf, forward and backward": plain_backward,
        "run_with_cache, incl_bwd, the same places": lambda: ours_backward(names),
        "run_with_cache, incl_bwd, everything": lambda: ours_backward(None),
    }
    measure(backward, max(5, rounds // 2))


def main() -> None:
    """Each model, batch and allocator in a process of its own."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(os.environ.get("THREADS", torch.get_num_threads())))
        index, batch, positions = map(int, sys.argv[1:])
        one(index, (batch, positions))
        return
    for index, (name, _) in enumerate(MODELS.items()):
        for shape in ("1 16",) if name.startswith("tiny") else ("1 128", "4 512"):
            for extra in ({}, KEEP):
                subprocess.run(
                    [sys.executable, __file__, str(index), *shape.split()], check=True, env=os.environ | extra
                )


if __name__ == "__main__":
    main()
