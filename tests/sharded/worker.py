"""What each of several processes runs: cases that compare a model spread over them with the same
model in one.

    torchrun --nproc-per-node 2 -m tests.sharded.worker FOLDER CASE KIND ...

It writes ``FOLDER/results.json``: for each case and kind what went wrong on any process, "" where
nothing did.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers.utils import logging

from adapters.imports import VersionError
from tests.sharded import cases, models

WRONG = (
    pytest.fail.Exception,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    VersionError,
)


def begin(on: str) -> None:
    """Joins the processes that torchrun started.

    Args:
        on: ``"nccl"``, each on a GPU of its own, or ``"gloo"``.
    """
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if on == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(on, timeout=timedelta(seconds=60))


def wrong_in(name: str, folder: Path) -> str:
    """What goes wrong in a case on any process; "" where nothing does. All have to ask.

    Args:
        name: ``case:kind``.
        folder: where models are saved, which all see.
    """
    case, _, kind = name.partition(":")
    if dist.get_rank() == 0 and not (folder / kind).exists():
        models.save(kind, folder)
    dist.barrier()
    if case in cases.ENDS:
        getattr(cases, case)(kind, folder)
    try:
        getattr(cases, case)(kind, folder)
        wrong = ""
    except WRONG:  # it is the result, and the next case runs
        wrong = traceback.format_exc()
        print(
            wrong, file=sys.stderr
        )  # where another process waits for this one, nothing else is seen of it
    all_wrong: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(all_wrong, wrong)
    return "\n".join(f"process {rank}: {each}" for rank, each in enumerate(all_wrong) if each)


def main(folder: Path, names: list[str]) -> None:
    """Runs cases, each named ``case:kind``."""
    begin(os.environ.get("SHARDED_ON", "gloo"))
    results = {}
    for name in names:
        results[name] = wrong_in(name, folder)
        if dist.get_rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
