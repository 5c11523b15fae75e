import pytest
import torch

from bridge import TransformerBridge
from bridge.circuits import Graph, logit_difference
from tests.circuits.by_hand import ByHand
from tests.conftest import tiny


@pytest.fixture(scope="session")
def gpt2():
    return TransformerBridge(tiny("gpt2", dtype=torch.float64))


@pytest.fixture(scope="session")
def graph(gpt2):
    return Graph.of(gpt2)


@pytest.fixture
def hand(gpt2, graph):
    return ByHand(gpt2.original_model, graph)


@pytest.fixture
def clean():
    return torch.randint(0, 61, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def corrupted(clean):
    return torch.cat([clean[:, :2], (clean[:, 2:3] + 7) % 61, clean[:, 3:]], dim=1)


@pytest.fixture
def metric():
    return logit_difference(torch.tensor([5, 8]), torch.tensor([9, 2]))
