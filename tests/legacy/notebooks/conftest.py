"""What every notebook begins with: gradients off, and a model."""

import pytest
import torch

from bridge.embedded import MODEL_DIR
from bridge.legacy import HookedTransformer


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def model():
    return HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
