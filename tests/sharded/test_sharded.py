"""Models over two processes show, and compute, what they do in one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharded.cases import ENDS
from tests.sharded.models import KINDS, OF_EIGHT, OF_FOUR

ROOT = Path(__file__).resolve().parent.parent.parent
#: What is tried of every family.
OF_EACH = (
    "every_activation",
    "every_edit",
    "gradients_of_parameters",
    "heads_knocked_out",
    "generation",
    "weights_in_full",
    "analysis",
    "built_on_points",
    "processed",
    "verified",
)
#: A small part, seconds long.
CASES = (
    "said_to_be_tensor_parallel:llama",
    "every_activation:mixtral",
    "every_edit:qwen3",
    "weights_in_full:llama",
    "generation:llama",
    "gradients_of_parameters:mixtral",
    "analysis:llama",
    "built_on_points:llama",
    "every_edit:nanochat",
    "found_where_it_was_kept:nanochat",
    "different_edits_are_refused:llama",
    "different_gradients_are_refused:llama",
    "different_inputs_are_refused:llama",
    "not_compared:llama",
    "what_was_found_by_hostile_probes:llama",
    "harvested:llama",
    "many_requests:llama",
    "too_few_heads_are_refused:llama_of_three_keys",
    "traced:llama",
    "every_edit:mixtral_by_expert",
    "processed:qwen2",
    "processed_by_fsdp:llama",
    "unequal_parts_are_refused:llama_odd",
    "spread_without_a_plan_is_refused:llama",
    "inferring_is_refused:llama",
    "declared_in_one_process:llama",
    "made_for_one_process:llama",
    "rows_of_its_own:llama",
    "harvested_by_each:llama",
    "requests_of_each:llama",
    "copied:llama",
    "adapters_of_peft_are_refused:llama",
)
#: The rest of what two processes do.
MORE = (
    "twelve_wrong_uses:llama",
    "harvested:mixtral_by_expert",
    "many_requests:qwen3_moe_by_expert",
    "context_parallel_is_refused:llama",
    "requests_of_each:qwen3_moe",
    *(f"rows_of_its_own:{kind}" for kind in ("mixtral", "gemma2", "qwen3", "gpt2")),
    *(f"processed_by_fsdp:{kind}" for kind in ("gpt2", "gemma2")),
    *(f"no_place_under_fsdp:{kind}" for kind in ("llama_tied", "qwen2")),
)


def run(folder: Path, cases: tuple[str, ...], processes: int, on: str = "gloo") -> dict[str, str]:
    """What went wrong in each case."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SHARDED_ON": on}
    if on == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, "-m", "tests.sharded.worker", str(folder), *cases],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = folder / "results.json"
    found: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
    return {case: found.get(case, f"it did not end: {done.stderr[-20000:]}") for case in cases}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("sharded"), CASES, 2)


@pytest.mark.parametrize("case", CASES)
def test_over_two_processes(results: dict[str, str], case: str):
    if refused := re.match(
        r"process 0(?s:.*)VersionError: (.*)", results[case]
    ):  # not where the run broke off
        pytest.skip(f"refused by name: {refused[1]}")
    assert not results[case], results[case]


@pytest.mark.slow
def test_more_over_two_processes(tmp_path: Path):
    wrong = {case: found for case, found in run(tmp_path, MORE, 2).items() if found}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("llama_odd", "llama_of_three_keys", "gpt2")]
)
def test_each_family(kind: str, tmp_path: Path):
    cases = [f"{case}:{kind}" for case in OF_EACH]
    wrong = {case: found for case, found in run(tmp_path, tuple(cases), 2).items() if found}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--prompt", "The capital of France is"],
        ["generate", "embedded", "The capital of France is", "--max-new-tokens", "5"],
        ["hooks", "embedded"],
    ],
    ids=lambda command: command[0],
)
def test_commands_print_what_they_do_in_one_process(command: list[str]):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    said = [
        subprocess.run(
            [sys.executable, *start, "-m", "bridge", *command, *end],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
        for start, end in ((torchrun, ["--tp"]), ([], []))
    ]
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_one_process_alone_ends_the_run(case: str, tmp_path: Path):
    began = time.monotonic()
    (said,) = run(tmp_path, (f"{case}:llama",), 2).values()
    words = (
        ("KeyError: 'mine'",)
        if "breaks" in case
        else ("DifferentEditsError", "did not come there in 2 seconds")
    )
    assert all(word in said for word in words), said
    assert time.monotonic() - began < 60  # where they begin and load, too


@pytest.mark.slow
def test_the_check_for_gpus():
    """It prints what is right, without GPUs as well; where there are none it says so."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = [
        subprocess.run(
            [*command, "tools.nccl_check", *more],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        for more in (["--on", "gloo", "--only", "generation,traced"], [])
    ]
    assert done[0].returncode == 0 and "3 of 3 are right" in done[0].stdout, done[0].stderr
    assert "nobody listens" in done[0].stdout and "2 processes by gloo" in done[0].stdout
    assert done[1].returncode and "there is no GPU that torch can use here" in done[1].stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_FOUR)
def test_over_four_processes(kind: str, tmp_path: Path):
    cases = [f"{case}:{kind}" for case in OF_EACH]
    if kind == "llama_of_four":
        cases += [f"harvested_by_each:{kind}", f"requests_of_each:{kind}"]
    wrong = {case: found for case, found in run(tmp_path, tuple(cases), 4).items() if found}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_EIGHT)
def test_over_eight_processes(kind: str, tmp_path: Path):
    cases = (
        ("every_activation", "every_edit")
        if kind != "llama_of_four_keys"
        else ("too_few_heads_are_refused",)
    )
    wrong = {
        case: found
        for case, found in run(tmp_path, tuple(f"{case}:{kind}" for case in cases), 8).items()
        if found
    }
    assert not wrong, wrong
