"""`utilities`: devices and activation functions."""

import pytest
import torch

import bridge.legacy as transformer_lens
from bridge.legacy import utils
from bridge.legacy.utilities import activation_functions, devices


def test_the_same_names_in_both_places():
    assert transformer_lens.utilities.devices is devices
    assert devices.get_device is utils.get_device
    assert utils.ACTIVATION_FN_DICT is activation_functions.SUPPORTED_ACTIVATIONS
    for name, fn in activation_functions.SUPPORTED_ACTIVATIONS.items():
        assert fn(torch.zeros(1, 4, 8)).shape == (1, 4, 8), name


@pytest.mark.parametrize(
    ("cuda", "mps", "allowed", "right"),
    [
        (True, True, "1", "cuda"),
        (False, True, "1", "mps"),
        (False, True, "", "cpu"),
        (False, False, "1", "cpu"),
    ],
)
def test_which_device_is_chosen(monkeypatch, cuda, mps, allowed, right):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", allowed)
    assert utils.get_device().type == right
