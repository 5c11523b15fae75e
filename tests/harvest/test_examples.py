"""The examples that read a harvest."""

import importlib.util
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def example(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_linear_probe(capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    found = example("linear_probe").main(60)
    # The embedding knows the word itself alone; attention brings the one before.
    assert found["blocks.0.hook_resid_post"] > found["hook_embed"] + 0.05
    assert found["blocks.0.hook_resid_post"] > found["always the most common word"] + 0.3


def test_sparse_autoencoder(capsys):
    pytest.importorskip(
        "sae_lens", reason="SAELens is not installed (it wants an environment of its own)"
    )
    assert example("sparse_autoencoder").main(200, 200) > 0.7
