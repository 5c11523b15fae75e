"""What importing the class costs: our own modules' time, apart from torch's and transformers'.

Interpreters are started in turn, with and without ours; `-X importtime` says what each module took
itself. The figure is that of our modules when torch and transformers' base classes are there
already. On a busy machine those seconds hold the waiting too; the processor's time for the same
import, which is measured without `-X importtime`, does not.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

OURS = ("adapters", "bridge", "weight_processing")
THEIRS = "import torch, transformers; transformers.PreTrainedModel; transformers.GenerationMixin"
LINE = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)$", re.MULTILINE)
TIMED = f"import time; {THEIRS}; begun = time.process_time(); from bridge import TransformerBridge"
RUNS = 7


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that sees our modules."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment
    )


def seconds(code: str) -> tuple[float, float, int]:
    """Of our modules, of all others, and how many are ours."""
    printed = started("-X", "importtime", "-c", code).stderr
    found = [(int(each), name.split(".")[0]) for each, name in LINE.findall(printed)]
    ours = [each for each, package in found if package in OURS]
    return sum(ours) / 1e6, sum(each for each, _ in found) / 1e6 - sum(ours) / 1e6, len(ours)


def main() -> None:
    rows = [
        (seconds(THEIRS), seconds(f"{THEIRS}; from bridge import TransformerBridge"))
        for _ in range(RUNS)
    ]
    ours = [with_ours[0] for _, with_ours in rows]
    theirs = [alone[1] for alone, _ in rows]
    more = [with_ours[1] - alone[1] for alone, with_ours in rows]
    print(f"torch and transformers     {statistics.median(theirs):.2f} s")
    print(
        f"our {rows[0][1][2]} modules themselves  {statistics.median(ours):.2f} s  ({min(ours):.2f}"
        f" to {max(ours):.2f})"
    )
    used = [
        float(started("-c", f"{TIMED}; print(time.process_time() - begun)").stdout)
        for _ in range(RUNS)
    ]
    print(
        f"of a processor, with those {statistics.median(used):.2f} s  ({min(used):.2f} to"
        f" {max(used):.2f})"
    )
    print(f"what they bring besides    {statistics.median(more):.2f} s")
    ratio = statistics.median(own / other for own, other in zip(ours, theirs, strict=True))
    print(f"ours to theirs             {ratio:.2f}")


if __name__ == "__main__":
    main()
