"""Tests on an accelerator: `make gpu`."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
