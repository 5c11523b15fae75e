"""Models over two processes show, and compute, what they do in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = (
    "said_to_be_tensor_parallel:llama",
    "every_activation:llama",
    "every_edit:llama",
    "gradients_of_parameters:llama",
    "heads_knocked_out:llama",
    "weights_in_full:llama",
    "generation:llama",
    "analysis:llama",
    "processing_is_refused:llama",
    "expert_parallel_is_refused:mixtral",
    "inside_experts_is_refused:mixtral",
    "spread_without_a_plan_is_refused:llama",
    "inferring_is_refused:llama",
    "rows_of_its_own:llama",
)


def run(folder: Path, cases: tuple[str, ...], processes: int) -> dict[str, str]:
    """What went wrong in each case."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "-m", "tests.sharded.worker", str(folder), *cases],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    results = folder / "results.json"
    found: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
    return {case: found.get(case, f"it did not end: {done.stderr[-4000:]}") for case in cases}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("sharded"), CASES, 2)


@pytest.mark.parametrize("case", CASES)
def test_over_two_processes(results: dict[str, str], case: str):
    assert not results[case], results[case]
