"""Whether a model over several GPUs shows, and computes, what it does in one process: two minutes.

    torchrun --nproc-per-node 2 -m tools.nccl_check              # the extra `test` is needed
    torchrun --nproc-per-node 2 -m tools.nccl_check --on gloo    # the same without GPUs

Two, four or eight processes. The models are tiny and random, and nothing is fetched. Each line is
printed as soon as it is known. A process that waits for another in vain ends after a minute; the
lines printed until then say where.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from benchmarks.sharded import ratios
from bridge.version import __version__
from tests.sharded.worker import begin, wrong_in

#: Models for a number of processes: one of dense layers, and one whose experts are spread by
#: number.
KINDS = {
    2: ("llama", "qwen3_moe_by_expert"),
    4: ("llama_of_four", "qwen3_moe_by_expert_of_four"),
    8: ("llama_of_eight", "qwen3_moe_by_expert_of_eight"),
}
#: What is tried of both, and what of the first alone.
OF_BOTH = (
    "every_activation",
    "every_edit",
    "gradients_of_parameters",
    "generation",
    "many_requests",
    "verified",
)
OF_ONE = (
    "said_to_be_tensor_parallel",
    "analysis",
    "traced",
    "copied",
    "processed",
    "harvested",
    "rows_of_its_own",
    "different_edits_are_refused",
    "different_inputs_are_refused",
    "harvested_by_each",
    "requests_of_each",
)


def say(line: str) -> None:
    """Prints a line, on the first process."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def machine(on: str) -> list[str]:
    """What the machine is."""
    found = [
        (
            f"transformer-bridge {__version__}, torch {torch.__version__}, transformers"
            f" {transformers.__version__}, Python {platform.python_version()}, {platform.system()}"
            f" {platform.machine()}"
        ),
        f"{dist.get_world_size()} processes by {on}",
    ]
    if on == "nccl":
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found.append(f"CUDA {torch.version.cuda}, NCCL {version}: {', '.join(names)}")
    return found


def main() -> None:
    """Runs all of it; what went wrong is printed behind the table, and is the exit status of the
    first process.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--only", default="", help="cases, with commas")
    given = parser.parse_args()
    if given.on == "nccl" and not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use here; --on gloo tries the same without")
    begin(given.on)
    size = dist.get_world_size()
    if size not in KINDS:
        sys.exit(f"there are {size} processes; it has models for {', '.join(map(str, KINDS))}")
    dense, mixture = KINDS[size]
    names = [f"{case}:{kind}" for kind in (dense, mixture) for case in OF_BOTH] + [
        f"{case}:{dense}" for case in OF_ONE
    ]
    if given.only:
        names = [name for name in names if name.partition(":")[0] in given.only.split(",")]
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    for line in machine(given.on):
        say(line)
    wrong: dict[str, str] = {}
    for name in names:
        began = time.monotonic()
        found = wrong_in(name, Path(places[0]))
        wrong |= {name: found} if found else {}
        case, _, kind = name.partition(":")
        seconds = time.monotonic() - began
        verdict = "WRONG" if found else "ok"
        say(f"{verdict:6}{case.replace('_', ' '):32}{kind:32}{seconds:5.1f} s")
    say("Times, as ratios to the model alone:")
    for run, ratio in ratios(11).items():
        say(f"      {run:<42}{ratio:6.2f}")
    for name, found in wrong.items():
        say(f"\n{name}\n{found}")
    say(
        f"{len(names) - len(wrong)} of {len(names)} are right. Send us all of this, also where all"
        " is right."
    )
    dist.barrier()
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(places[0])
    dist.destroy_process_group()
    sys.exit(int(first and bool(wrong)))


if __name__ == "__main__":
    main()
