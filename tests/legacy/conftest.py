import pytest

from bridge.legacy import HookedTransformer
from tests.reference import DATA


@pytest.fixture(scope="session")
def loaded():
    """The tiny GPT-2 of the reference, as HookedTransformer loads it. No test changes its
    weights.
    """
    return HookedTransformer.from_pretrained(str(DATA / "gpt2"), device="cpu")


@pytest.fixture
def model(loaded):
    yield loaded
    loaded.reset_hooks(including_permanent=True)
    for switch in ("attn_result", "split_qkv_input", "attn_in", "hook_mlp_in"):
        getattr(loaded, f"set_use_{switch}")(False)
