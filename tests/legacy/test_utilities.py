"""`utilities`: devices and activation functions."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import bridge.legacy as transformer_lens
from bridge.legacy import utils
from bridge.legacy.utilities import activation_functions, devices


def test_the_same_names_in_both_places():
    assert transformer_lens.utilities.devices is devices
    assert devices.get_device is utils.get_device
    assert devices.warn_if_mps is utils.warn_if_mps
    assert utils.ACTIVATION_FN_DICT is activation_functions.SUPPORTED_ACTIVATIONS
    for name, fn in activation_functions.SUPPORTED_ACTIVATIONS.items():
        assert fn(torch.zeros(1, 4, 8)).shape == (1, 4, 8), name


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs, of 80 bytes each, of which 60, 15 and 40 are taken."""
    taken = [60, 15, 40]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda i: taken[i])


def test_the_emptiest_gpu(gpus):
    free = devices.determine_available_memory_for_available_devices(max_devices=3)
    assert free == [(0, 20), (1, 65), (2, 40)]
    assert devices.sort_devices_based_on_available_memory(free) == [(1, 65), (2, 40), (0, 20)]
    assert devices.get_best_available_cuda_device() == torch.device("cuda", 1)
    assert devices.get_best_available_cuda_device(1) == torch.device("cuda", 0)
    cfg = SimpleNamespace(device="cuda", n_devices=3)
    assert devices.get_best_available_device(cfg) == torch.device("cuda", 1)
    cfg.n_devices = 1
    assert devices.get_best_available_device(cfg) == torch.device("cuda")
    cfg.device, cfg.n_devices = "cpu", 3
    assert devices.get_best_available_device(cfg) == torch.device("cpu")


def test_no_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(OSError, match="no CUDA device"):
        devices.get_best_available_cuda_device()


def test_blocks_are_dealt_out_evenly():
    cfg = SimpleNamespace(device="cuda:1", n_devices=2, n_layers=6)
    places = [devices.get_device_for_block_index(i, cfg).index for i in range(6)]
    assert places == [1, 1, 1, 2, 2, 2]
    assert devices.get_device_for_block_index(5, cfg, "cuda:0").index == 1
    assert devices.get_device_for_block_index(5, cfg, "cpu") == torch.device("cpu")


def test_moving_a_model_changes_its_configuration(capsys):
    from bridge.legacy import HookedTransformer

    model = HookedTransformer(
        {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10, "attn_only": True, "device": "cpu"}
    )
    assert devices.move_to_and_update_config(model, torch.float64, print_details=False) is model
    assert model.cfg.dtype == model.W_E.dtype == torch.float64
    assert devices.move_to_and_update_config(model, "cpu") is model
    assert str(model.cfg.device) == "cpu"
    assert capsys.readouterr().out == ""


def test_apples_gpu_is_warned_of_once(monkeypatch):
    monkeypatch.delenv("TRANSFORMERLENS_ALLOW_MPS", raising=False)
    devices._warn.cache_clear()
    for device in ("cpu", "cuda", torch.device("cpu")):
        utils.warn_if_mps(device)
    with pytest.warns(UserWarning, match=r"MPS.*TRANSFORMERLENS_ALLOW_MPS=1"):
        utils.warn_if_mps("mps")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        utils.warn_if_mps(torch.device("mps"))
        devices._warn.cache_clear()
        monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", "1")
        utils.warn_if_mps("mps")


@pytest.mark.parametrize(
    ("cuda", "mps", "allowed", "right"),
    [(True, True, "1", "cuda"), (False, True, "1", "mps"), (False, True, "", "cpu"), (False, False, "1", "cpu")],
)
def test_which_device_is_chosen(monkeypatch, cuda, mps, allowed, right):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", allowed)
    assert utils.get_device().type == right
