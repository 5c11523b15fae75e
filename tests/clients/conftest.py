"""Other people's programs, which import `transformer_lens`, on the model in the package: `make
clients`.
"""

import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
#: What each file needs, as it is imported.
NEEDS = {
    "test_auto_circuit": "auto_circuit",
    "test_circuit_tracer": "circuit_tracer",
    "test_circuitsvis": "circuitsvis",
    "test_gradient_rules": "gim",
    "test_inspect": "inspect_ai",
    "test_lm_eval": "lm_eval",
    "test_pyvene": "pyvene",
    "test_sae_lens": "sae_lens",
    "test_sae_lens_bases": "sae_lens",
    "test_tuned_lens": "tuned_lens",
}
collect_ignore = [
    f"{name}.py" for name, package in NEEDS.items() if importlib.util.find_spec(package) is None
]

#: TransformerLens 4.3, which only a process of its own imports.
TRANSFORMER_LENS_4 = pathlib.Path(sys.prefix) / "transformer_lens_4"

if len(collect_ignore) < len(NEEDS):
    import bridge.legacy.as_transformer_lens  # noqa: F401  # before any of them imports the other one


if not TRANSFORMER_LENS_4.is_dir():
    collect_ignore.append("test_jacobian_lens.py")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in pathlib.Path(item.fspath).parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.unchecked)
            item.add_marker(pytest.mark.filterwarnings("default"))  # their warnings are theirs


@pytest.fixture(scope="session")
def name():
    from bridge.embedded import MODEL_DIR

    return str(MODEL_DIR)


@pytest.fixture
def model(name):
    from transformer_lens import HookedTransformer

    return HookedTransformer.from_pretrained_no_processing(name, device="cpu")


@pytest.fixture(scope="session")
def texts():
    from bridge.embedded import prompts

    return [prompt.text + prompt.answer + "." for prompt in prompts("ioi", 64)]
