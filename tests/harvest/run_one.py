"""Harvests in processes of their own, to be killed.

``python -m tests.harvest.run_one`` imports everything once. For each line ``OUT TOKENS_PER_SHARD
COPIES [NOTE]`` it starts a process that harvests and writes how many shards it made, into NOTE or
beside OUT. It says the process's id, and then how it ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from bridge.harvest import harvest
from tests.harvest.common import RESID, TEXTS, Z


def main() -> None:
    """Serves until its input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        out, per_shard, copies, *note = line.split()
        child = os.fork()
        if not child:
            report = harvest(
                "embedded",
                TEXTS * int(copies),
                out=out,
                tokens_per_shard=int(per_shard),
                hook_points=[RESID, Z],
                context_size=32,
                batch_size=4,
            )
            Path(*(note or [out + ".made"])).write_text(str(report.made))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
