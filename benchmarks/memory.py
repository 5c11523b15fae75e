"""What long prompts need: the most that a process holds in a run, above its plain run, and what it
still holds after.

    python benchmarks/memory.py [POSITIONS]

Each row is a process of its own, on Linux, which counts a process's pages. The plain run has two
rows: they say what the allocator adds by itself.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAIN = "`hf(tokens)`"
ROWS = (
    PLAIN,
    "one residual stream",
    "one residual stream, `pos_slice=-1`",
    "one pattern, which nobody reads",
    "one pattern, read",
    "all patterns, `pos_slice=-1`",
    "everything, `pos_slice=-1`",
    "a hook on one pattern that only looks",
    "a lens at the last position",
)


def run(name: str, positions: int) -> None:
    """Does one thing after a plain run; prints megabytes at its most, afterwards, and when
    trimmed.
    """
    import torch
    from rows import llama, tokens_for

    from bridge import TransformerBridge

    torch.set_grad_enabled(False)
    hf = llama(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=100)
    hf.config.max_position_embeddings = positions
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, (1, positions))
    stream, pattern = "blocks.2.hook_resid_pre", "blocks.2.attn.hook_pattern"
    patterns = [f"blocks.{i}.attn.hook_pattern" for i in range(4)]
    jobs: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: hf(tokens),
        "one residual stream": lambda: bridge.run_with_cache(tokens, names_filter=stream),
        "one residual stream, `pos_slice=-1`": lambda: bridge.run_with_cache(
            tokens, names_filter=stream, pos_slice=-1
        ),
        "one pattern, which nobody reads": lambda: bridge.run_with_cache(
            tokens, names_filter=pattern
        ),
        "one pattern, read": lambda: bridge.run_with_cache(tokens, names_filter=pattern)[1][
            pattern
        ],
        "all patterns, `pos_slice=-1`": lambda: bridge.run_with_cache(
            tokens, names_filter=patterns, pos_slice=-1
        ),
        "everything, `pos_slice=-1`": lambda: bridge.run_with_cache(tokens, pos_slice=-1),
        "a hook on one pattern that only looks": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[(pattern, lambda x, hook: None)]
        ),
        "a lens at the last position": lambda: bridge.lens(tokens, pos_slice=-1),
    }
    bridge(tokens[:, :16])
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = jobs[name]()
    most = resident("VmHWM") - before
    del kept
    after = resident("VmRSS") - before
    trim(0)
    print(most, after, resident("VmRSS") - before)


def resident(what: str) -> float:
    """Megabytes, by the system's count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the system counts no {what}")


def table(positions: int) -> list[str]:
    """The rows as lines of Markdown: what each needs above the first."""
    lines = [
        f"{positions} tokens:",
        "",
        "| | most, MB above the plain run | after `del`, MB | after `malloc_trim(0)`, MB |",
        "|---|---|---|---|",
    ]
    first: float | None = None
    for name in (PLAIN, *ROWS):
        command = [sys.executable, __file__, name, str(positions)]
        most, after, trimmed = map(
            float,
            subprocess.run(command, capture_output=True, check=True, text=True).stdout.split(),
        )
        label = name if first is not None and name != PLAIN else f"{name} ({most:.0f} MB)"
        first = most if first is None else first
        lines.append(f"| {label} | {most - first:.0f} | {after:.0f} | {trimmed:.0f} |")
    return lines


def main() -> None:
    """Prints the table, or does one row's thing."""
    if len(sys.argv) == 3:
        run(sys.argv[1], int(sys.argv[2]))
        return
    print("\n".join(table(int(sys.argv[1]) if len(sys.argv) == 2 else 8192)))


if __name__ == "__main__":
    main()
