"""Long prompts: what one head, one query, the statistics of all heads, a lens and a sweep take
beside the plain run.

    python benchmarks/long.py [POSITIONS ...]
    python benchmarks/long.py sweep [POSITIONS ...]

One layer of width 2,048, 32 heads with keys in 8 groups. Everything is done in turn in one process,
on one thread; time is the processor's. Memory is the most that the process holds above what it held
before, on Linux, less the plain run's. A sweep patches the stream before the last of two such
layers, of width 512, at 32 positions, one after the other; it is done once, and beside it a whole
run for each.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alternated import NULL, Timed, alternated, spread
from memory import resident

PLAIN = "`hf(tokens)`"
NAME = "blocks.0.attn.hook_pattern"


def model_of(positions: int, **fields: Any) -> tuple[Any, Any, Any]:
    """A model, its bridge, and tokens."""
    import torch
    from rows import llama, tokens_for

    from bridge import TransformerBridge

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    usual = {
        "hidden_size": 2048,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    usual |= {"intermediate_size": 5632, "vocab_size": 1000, "max_position_embeddings": positions}
    hf = llama(**usual | fields)
    return hf, TransformerBridge(hf), tokens_for(hf, (1, positions))


def jobs_of(positions: int) -> dict[str, Callable[[], Any]]:
    """What is done, by name."""
    import torch

    from bridge.analysis.patterns import PatternStatistics
    from bridge.interventions import Scale, Touching

    hf, bridge, tokens = model_of(positions)

    def halved(pattern: torch.Tensor, hook: Any) -> None:
        pattern *= 0.5

    def cached() -> Any:
        return bridge.run_with_cache(tokens, names_filter=NAME)[1]

    def traced() -> Any:
        with bridge.trace(tokens) as run:
            run.part(NAME, heads=3).mul_(0.5)
        return run.logits

    def edited(function: Any) -> Any:
        return bridge.run_with_hooks(tokens, fwd_hooks=[(NAME, function)])

    seen = PatternStatistics
    jobs: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: hf(tokens),
        "one head's pattern, read": lambda: cached().part(NAME, heads=3),
        "the same by `names_filter={name: 3}`": (
            lambda: bridge.run_with_cache(tokens, names_filter={NAME: 3})[1].part(NAME, heads=3)
        ),
        "one head's pattern, edited by an operation": lambda: edited(Scale(0.5, heads=3)),
        "one head's pattern, edited by a function": lambda: edited(Touching(halved, heads=3)),
        "one head's pattern, edited in a trace": traced,
        "one query's pattern, all heads, read": lambda: cached().part(NAME, queries=-1),
        "entropy, attention to a key and the top key, all heads": lambda: bridge.run_with_callback(
            tokens, seen(keys=[0], top=1), NAME, max_bytes=2**25
        ),
        "a lens at all positions, the likeliest token": (
            lambda: bridge.lens(tokens, max_bytes=2**25).top(1)
        ),
    }
    if positions <= 4096:
        jobs["the whole pattern, read"] = lambda: cached()[NAME]
        jobs["the whole pattern, edited by a plain function"] = lambda: edited(halved)
    return jobs


def watched(name: str, job: Callable[[], Any], held: dict[str, float]) -> Callable[[], Any]:
    """The same thing done, and the least of what it held at its most kept: the first one loads
    libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)

    def run() -> Any:
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        kept = job()
        most = resident("VmHWM") - before
        held[name] = min(held.get(name, most), most)
        return kept

    return run


def once(job: Callable[[], Any]) -> float:
    """The processor's seconds."""
    begun = time.process_time()
    job()
    return time.process_time() - begun


def table(positions: int) -> list[str]:
    """The rows as lines of Markdown."""
    held: dict[str, float] = {}
    jobs = {name: watched(name, job, held) for name, job in jobs_of(positions).items()}
    if positions > 8192:  # minutes each: once, and the plain run before and behind
        first = once(jobs[PLAIN])
        timed = {
            name: Timed((seconds := once(job), seconds), (first, first))
            for name, job in jobs.items()
        }
    else:
        timed = alternated(jobs, 3 if positions <= 4096 else 2, clock=time.process_time)
        held[NULL] = held[PLAIN]
    lines = [f"{positions} tokens (a head's pattern is {positions**2 * 4 / 2**20:.0f} MB):", ""]
    lines += ["| | time, of the plain run's | most, MB above the plain run |", "|---|---|---|"]
    for name, own in timed.items():
        label = name if name != PLAIN else f"{name} ({own.seconds:.1f} s, {held[name]:.0f} MB)"
        lines.append(f"| {label} | {spread(own.ratios)} | {held[name] - held[PLAIN]:.0f} |")
    return lines


def sweep(positions: int) -> list[str]:
    """The rows of a sweep."""
    import torch

    from bridge.patching import generic_activation_patch, layer_pos_patch_setter

    hf, bridge, tokens = model_of(
        positions,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1408,
        vocab_size=32000,
    )
    name, places = "blocks.1.hook_resid_pre", range(positions // 64, positions, positions // 32)
    _, clean = bridge.run_with_cache(tokens.flip(1), names_filter=name)
    metric = lambda logits: logits[0, -1, 5]

    def ours() -> Any:
        table = {"layer": [1] * len(places), "pos": list(places)}
        return generic_activation_patch(
            bridge,
            tokens,
            clean,
            metric,
            layer_pos_patch_setter,
            "resid_pre",
            index_df=pandas.DataFrame(table),
            max_bytes=2**28,
            verbose=False,
        )

    def plain() -> Any:
        def at(position: int) -> Any:
            def put(x: torch.Tensor, hook: Any) -> None:
                x[:, position] = clean[name][:, position]

            return metric(bridge.run_with_hooks(tokens, fwd_hooks=[(name, put)])).clone()

        return torch.stack([at(position) for position in places])

    import pandas

    held: dict[str, float] = {}
    jobs = {PLAIN: lambda: hf(tokens), "a sweep": ours, "a whole run for each": plain}
    took: dict[str, float] = {}
    found: dict[str, Any] = {}
    jobs[PLAIN]()
    for what, job in jobs.items():
        begun = time.process_time()
        found[what] = watched(what, job, held)()
        took[what] = time.process_time() - begun
    off = float((found["a sweep"] - found["a whole run for each"]).abs().max())
    rows = [
        f"| {what} | {took[what]:.1f} s | {took[what] / took[PLAIN]:.2f} |"
        f" {held[what] - held[PLAIN]:.0f} |"
        for what in jobs
    ]
    head = "| | time | of the plain run's | most, MB above the plain run |"
    return [
        f"{positions} tokens, {len(places)} patches, farthest from whole runs {off:.1e}:",
        "",
        head,
        "|---|---|---|---|",
        *rows,
    ]


def main() -> None:
    """Prints a table for each length."""
    asked = sys.argv[1:]
    of = sweep if "sweep" in asked else table
    for positions in [int(x) for x in asked if x != "sweep"] or (2048, 4096, 8192):
        print("\n".join(of(positions)), flush=True)


if __name__ == "__main__":
    main()
