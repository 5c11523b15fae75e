"""Saving a processed model, loading it with and without the bridge, copying it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from bridge import NativeConfig, TransformerBridge
from bridge.native import NativeModel
from tests.adapters.by_hand import families
from tests.weight_processing.models import SAVED, copies, log_probs, processed, same, tiny, tokens
from weight_processing import saving as conversion
from weight_processing.check import InFloat32
from weight_processing.process import is_processed


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
    torch.testing.assert_close(
        log_probs(AutoModelForCausalLM.from_pretrained(tmp_path)), before, atol=3e-5, rtol=1e-5
    )


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


def test_refactored_heads_are_not_refactored_anew(tmp_path: Path) -> None:
    """Their columns may have either sign: what is loaded has those of what was saved."""
    bridge = processed("gpt_neo", refactor_factored_attn_matrices=True)
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            for block in bridge.blocks:
                getattr(block.attn, name).neg_()
    bridge.original_model.save_pretrained(tmp_path)
    again = TransformerBridge.boot_transformers(str(tmp_path))
    assert again.cfg.processed == bridge.cfg.processed
    for name, value in bridge.tl_parameters().items():
        torch.testing.assert_close(again.weights[name], value, atol=1e-5, rtol=1e-5, msg=name)


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
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.o_proj\.bias has changed since the value biases"
    ):
        bridge.original_model.save_pretrained(tmp_path)


def test_a_trained_unembedding_bias_is_kept(tmp_path: Path) -> None:
    model = processed("gpt2").original_model
    with torch.no_grad():
        model.lm_head.bias.add_(torch.randn(61))
        model.lm_head.weight.add_(torch.randn(61, 32))
    before = log_probs(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        log_probs(AutoModelForCausalLM.from_pretrained(tmp_path)), before, atol=3e-5, rtol=1e-5
    )


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
        torch.testing.assert_close(
            log_probs(loaded), log_probs(bridge.original_model), atol=3e-5, rtol=1e-5
        )


def trained(bridge: TransformerBridge) -> None:
    """Moves every parameter but the output biases that came from value biases."""
    outputs = [name for name, _ in bridge.named_parameters() if "out_proj" in name]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in bridge.named_parameters():
            if name not in outputs:
                parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("case", ["gpt2", "gptj", "gpt_neox", "gpt_neo", "phi"])
def test_training_a_processed_model(case: str, tmp_path: Path) -> None:
    bridge = processed(case)
    trained(bridge)
    before = log_probs(bridge.original_model)
    bridge.original_model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(loaded), before, atol=3e-5, rtol=1e-5)
    again = TransformerBridge.boot_transformers(str(tmp_path))
    torch.testing.assert_close(log_probs(again.original_model), before, atol=3e-5, rtol=1e-5)
    bridge.process_weights()
    right = bridge.tl_parameters()
    for name, value in again.tl_parameters().items():
        torch.testing.assert_close(value, right[name], atol=1e-5, rtol=1e-5, msg=name)


def test_fused_projections_without_biases(tmp_path: Path) -> None:
    config = GPTNeoXConfig(**families.SIZES, attention_bias=False)
    model = GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    before, bridge = log_probs(model), TransformerBridge(model)
    bridge.process_weights(check="each")
    assert bridge.cfg.processed["fold_value_biases"] == "done"
    model.save_pretrained(tmp_path)
    loaded, info = GPTNeoXForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(log_probs(loaded.eval()), before, atol=3e-5, rtol=1e-5)
    again = TransformerBridge.boot_transformers(str(tmp_path))
    for name, value in bridge.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_constant_is_not_rounded_away(dtype: torch.dtype, tmp_path: Path) -> None:
    """A bias of about 1 is a constant of 1/512 in each row of the unembedding, whose elements are
    far larger.
    """
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=512, n_layer=1, n_head=4, vocab_size=61, bos_token_id=0, eos_token_id=0)
    )
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        model.transformer.wte.weight.normal_(0, 0.5)
        model.transformer.ln_f.bias.normal_(0, 0.1)
    bridge = TransformerBridge(model.to(dtype).eval())
    bridge.process_weights()
    model.save_pretrained(tmp_path)
    again = TransformerBridge.boot_transformers(str(tmp_path))
    assert bridge.b_U.float().std() > 0.5
    torch.testing.assert_close(again.b_U, bridge.b_U, atol=0.02, rtol=0)
    with InFloat32():  # with logits that are not rounded themselves
        difference = log_probs(again.original_model) - log_probs(model)
    assert difference.square().mean().sqrt() < 8 * torch.finfo(dtype).eps


def test_an_output_bias_trained_in_half_precision_is_not_lost_either(tmp_path: Path) -> None:
    bridge = TransformerBridge(tiny("qwen2", torch.bfloat16))
    bridge.process_weights()
    bias = bridge.original_model.model.layers[0].self_attn.o_proj.bias
    with torch.no_grad():
        bias[3] += 0.1 * bias.abs().max()
    with pytest.raises(ValueError, match="has changed since the value biases"):
        bridge.original_model.save_pretrained(tmp_path)


def test_in_another_type_since(tmp_path: Path) -> None:
    bridge = TransformerBridge(tiny("qwen2", torch.bfloat16))
    bridge.process_weights()
    model = bridge.original_model.float()
    before = log_probs(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        log_probs(AutoModelForCausalLM.from_pretrained(tmp_path)), before, atol=0.02, rtol=0
    )


def test_saving_in_float64_leaves_the_model_alone(tmp_path: Path) -> None:
    bridge = TransformerBridge(tiny("qwen2", torch.float64))
    bridge.process_weights()
    values = copies(bridge.original_model)
    bridge.original_model.save_pretrained(tmp_path)
    assert same(bridge.original_model, values)


def test_a_large_matrix_is_written_in_large_pieces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=61, bos_token_id=0, eos_token_id=0)
    )
    model.transformer.ln_f.bias.data.normal_()
    TransformerBridge(model.bfloat16().eval()).process_weights()
    sizes = []

    def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(len(x))
        return x.to(dtype)

    monkeypatch.setattr(conversion, "_PIECE", 32 * 20)
    monkeypatch.setattr(conversion, "_rounded", rounded)
    model.save_pretrained(tmp_path)
    assert sizes == [20, 20, 20, 1]


@pytest.mark.parametrize("how", ["a copy", "the same memory"])
def test_an_unembedding_that_was_untied_by_hand(how: str, tmp_path: Path) -> None:
    model = tiny("llama")
    assert model.config.tie_word_embeddings
    shared = model.model.embed_tokens.weight.detach()
    model.lm_head.weight = nn.Parameter(shared.clone() if how == "a copy" else shared)
    before, embedding = log_probs(model), shared.clone()
    TransformerBridge(model).process_weights()
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        log_probs(AutoModelForCausalLM.from_pretrained(tmp_path)), before, atol=3e-5, rtol=1e-5
    )


def test_the_generation_settings_are_kept(tmp_path: Path) -> None:
    model = processed("gpt2").original_model
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.max_new_tokens == 7


def test_native(tmp_path: Path) -> None:
    model = NativeModel(
        NativeConfig(n_layers=2, d_model=16, n_heads=2, d_vocab=61, n_ctx=20, act_fn="gelu", seed=0)
    )
    bridge = TransformerBridge(model.eval())
    assert not is_processed(model)
    bridge.process_weights()
    assert is_processed(model)
    model.save_pretrained(tmp_path)
    loaded = TransformerBridge.boot_transformers(str(tmp_path))
    assert loaded.cfg.processed == bridge.cfg.processed
    assert same(loaded.original_model, copies(model))
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())
