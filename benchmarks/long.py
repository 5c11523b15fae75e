"""Long prompts: what one head, one query, the statistics of all heads and a lens take beside the plain run.

    python benchmarks/long.py [POSITIONS ...]

One layer of width 2,048, 32 heads with keys in 8 groups. Everything is done in turn in one process, on one thread;
time is the processor's. Memory is the most that the process holds above what it held before, on Linux, less the plain
run's.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alternated import NULL, alternated, spread
from memory import resident

PLAIN = "`hf(tokens)`"
NAME = "blocks.0.attn.hook_pattern"


def jobs_of(positions: int) -> dict[str, Callable[[], Any]]:
    """What is done, by name."""
    import torch
    from rows import llama, tokens_for

    from bridge import TransformerBridge
    from bridge.analysis.patterns import PatternStatistics
    from bridge.interventions import Scale, Touching

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    hf = llama(
        hidden_size=2048, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, intermediate_size=5632,
        vocab_size=1000, max_position_embeddings=positions,
    )  # fmt: skip
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, (1, positions))

    def halved(pattern: torch.Tensor, hook: Any) -> None:
        pattern *= 0.5

    def cached() -> Any:
        return bridge.run_with_cache(tokens, names_filter=NAME)[1]

    def edited(function: Any) -> Any:
        return bridge.run_with_hooks(tokens, fwd_hooks=[(NAME, function)])

    seen = PatternStatistics
    jobs: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: hf(tokens),
        "one head's pattern, read": lambda: cached().part(NAME, heads=3),
        "one head's pattern, edited by an operation": lambda: edited(Scale(0.5, heads=3)),
        "one head's pattern, edited by a function": lambda: edited(Touching(halved, heads=3)),
        "one query's pattern, all heads, read": lambda: cached().part(NAME, queries=-1),
        "entropy, attention to a key and the top key, all heads": lambda: bridge.run_with_callback(
            tokens, seen(keys=[0], top=1), NAME, max_bytes=2**25
        ),
        "a lens at all positions, the likeliest token": lambda: bridge.lens(tokens).top(1),
    }
    if positions <= 4096:
        jobs["the whole pattern, read"] = lambda: cached()[NAME]
        jobs["the whole pattern, edited by a plain function"] = lambda: edited(halved)
    return jobs


def table(positions: int, rounds: int) -> list[str]:
    """The rows as lines of Markdown."""
    held: dict[str, float] = {}
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)

    def watched(name: str, job: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
            kept = job()
            most = resident("VmHWM") - before
            held[name] = min(held.get(name, most), most)  # the first one loads libraries
            return kept

        return run

    timed = alternated(
        {name: watched(name, job) for name, job in jobs_of(positions).items()}, rounds, clock=time.process_time
    )
    held[NULL] = held[PLAIN]
    lines = [f"{positions} tokens (a head's pattern is {positions**2 * 4 / 2**20:.0f} MB):", ""]
    lines += ["| | time, of the plain run's | most, MB above the plain run |", "|---|---|---|"]
    for name, own in timed.items():
        label = name if name != PLAIN else f"{name} ({own.seconds:.1f} s, {held[name]:.0f} MB)"
        lines.append(f"| {label} | {spread(own.ratios)} | {held[name] - held[PLAIN]:.0f} |")
    return lines


def main() -> None:
    """Prints a table for each length."""
    for positions in map(int, sys.argv[1:] or (2048, 4096, 8192)):
        print("\n".join(table(positions, rounds=3 if positions <= 2048 else 2)), flush=True)


if __name__ == "__main__":
    main()
