"""Saving a processed model, loading it with and without the bridge, copying it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bridge import NativeConfig, TransformerBridge
from bridge.native import NativeModel
from bridge.processing import is_processed
from tests.weight_processing.models import SAVED, copies, log_probs, processed, same, tiny, tokens


@pytest.mark.parametrize("case", SAVED)
def test_hugging_face_loads_the_same_function(case: str, tmp_path: Path) -> None:
    keys, before = set(tiny(case).state_dict()), log_probs(tiny(case))
    model = processed(case).original_model
    values = copies(model)
    model.save_pretrained(tmp_path)
    assert same(model, values)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert set(loaded.state_dict()) == keys
    assert not loaded.config.tie_word_embeddings
    torch.testing.assert_close(log_probs(loaded.eval()), before, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(log_probs(AutoModelForCausalLM.from_pretrained(tmp_path)), before, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("case", SAVED)
def test_the_bridge_loads_the_processed_model(case: str, tmp_path: Path) -> None:
    bridge = processed(case)
    bridge.original_model.save_pretrained(tmp_path / "once")
    again = TransformerBridge.boot_transformers(str(tmp_path / "once"))
    again.original_model.save_pretrained(tmp_path / "twice")
    for loaded in (again, TransformerBridge.boot_transformers(str(tmp_path / "twice"))):
        assert loaded.cfg.processed == bridge.cfg.processed
        assert loaded.cfg.normalization_type == bridge.cfg.normalization_type
        assert loaded.cfg.tie_word_embeddings is False
        values = loaded.state_dict()
        assert set(values) == set(bridge.state_dict())
        for name, value in bridge.state_dict().items():
            torch.testing.assert_close(values[name], value, atol=1e-6, rtol=1e-5, msg=name)
        before = copies(loaded.original_model)
        loaded.process_weights()
        assert same(loaded.original_model, before)


def test_wrapping_a_loaded_model_leaves_it_alone(tmp_path: Path) -> None:
    bridge = processed("gpt2")
    bridge.original_model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    values = copies(model)
    wrapped = TransformerBridge(model)
    assert same(model, values)
    assert wrapped.cfg.processed == {}  # its biases stand in its norms
    assert wrapped.cfg.normalization_type == "LN"
    wrapped.process_weights()
    torch.testing.assert_close(wrapped.b_U, bridge.b_U, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", ["gpt2", "qwen2"])
def test_in_bfloat16(case: str, tmp_path: Path) -> None:
    bridge = TransformerBridge(tiny(case, torch.bfloat16))
    bridge.process_weights()
    bridge.original_model.save_pretrained(tmp_path)
    loaded = TransformerBridge.boot_transformers(str(tmp_path))
    assert loaded.cfg.dtype == torch.bfloat16
    for name, value in bridge.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=0.05, rtol=0.02, msg=name)


def test_tied_embeddings_become_two() -> None:
    bridge = processed("gpt2")
    model = bridge.original_model
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()
    assert not model.config.tie_word_embeddings
    assert not bridge.cfg.tie_word_embeddings
    model.tie_weights()
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()


def test_an_output_bias_that_was_trained_is_not_lost_in_silence(tmp_path: Path) -> None:
    bridge = processed("qwen2")
    with torch.no_grad():
        bridge.original_model.model.layers[0].self_attn.o_proj.bias.add_(1.0)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.o_proj\.bias has changed since the value biases"):
        bridge.original_model.save_pretrained(tmp_path)


def test_a_trained_unembedding_bias_is_kept(tmp_path: Path) -> None:
    model = processed("gpt2").original_model
    with torch.no_grad():
        model.lm_head.bias.add_(torch.randn(61))
        model.lm_head.weight.add_(torch.randn(61, 32))
    before = log_probs(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(AutoModelForCausalLM.from_pretrained(tmp_path)), before, atol=3e-5, rtol=1e-5)


def test_in_several_files(tmp_path: Path) -> None:
    bridge = processed("gptj")
    bridge.original_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    before = log_probs(bridge.original_model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(loaded), before, atol=3e-5, rtol=1e-5)


def test_what_the_class_has_no_place_for_is_in_the_state_dict() -> None:
    bridge = processed("gpt2")
    assert "lm_head.bias" in bridge.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lm_head\.bias"):
        tiny("gpt2").load_state_dict(bridge.state_dict())
    bridge.load_state_dict(bridge.state_dict())


@pytest.mark.parametrize("case", ["gpt2", "gptj", "qwen2"])
def test_copies(case: str, tmp_path: Path) -> None:
    bridge = processed(case)
    for twin in (copy.deepcopy(bridge), pickle.loads(pickle.dumps(bridge))):
        assert twin.cfg.processed == bridge.cfg.processed
        assert torch.equal(twin(tokens()), bridge(tokens()))
        twin.original_model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(log_probs(loaded), log_probs(bridge.original_model), atol=3e-5, rtol=1e-5)


def test_native(tmp_path: Path) -> None:
    model = NativeModel(NativeConfig(n_layers=2, d_model=16, n_heads=2, d_vocab=61, n_ctx=20, act_fn="gelu", seed=0))
    bridge = TransformerBridge(model.eval())
    assert not is_processed(model)
    bridge.process_weights()
    assert is_processed(model)
    model.save_pretrained(tmp_path)
    loaded = TransformerBridge.boot_transformers(str(tmp_path))
    assert loaded.cfg.processed == bridge.cfg.processed
    assert same(loaded.original_model, copies(model))
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())
