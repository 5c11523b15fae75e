"""A model that two accelerators share shows, and computes, what it does on one."""

from pathlib import Path

import pytest
import torch

from tests.sharded.test_sharded import OF_EACH, run


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "mixtral_by_expert"])
def test_over_two_accelerators(kind: str, tmp_path: Path):
    if torch.cuda.device_count() < 2:
        pytest.skip(
            f"two accelerators are needed for NCCL, and there is {torch.cuda.device_count()}"
        )
    wrong = {
        case: found
        for case, found in run(tmp_path, tuple(f"{c}:{kind}" for c in OF_EACH), 2, "nccl").items()
        if found
    }
    assert not wrong, wrong
