"""Promise 1: the Hugging Face model is the only implementation, and stays as it is."""

import copy
import io
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge import TransformerBridge
from tests.conftest import FAMILIES, tiny, torch_hooks
from tests.tiny_models import checkpoint


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_bit_equal(name, implementation, tokens):
    hf = tiny(name, implementation)
    expected = hf(tokens).logits
    bridge = TransformerBridge(hf)
    assert torch.equal(bridge(tokens), expected)
    bridge.run_with_cache(tokens)
    bridge.run_with_hooks(
        tokens,
        fwd_hooks=[
            (
                "blocks.0.hook_resid_mid" if name != "gpt_neox" else "blocks.0.hook_mlp_out",
                lambda x, hook: x * 2,
            )
        ],
    )
    assert torch.equal(bridge(tokens), expected)


def test_reading_everything_leaves_the_other_implementation_within_rounding(bridge, tokens):
    logits, _ = bridge.run_with_cache(tokens)
    torch.testing.assert_close(logits, bridge(tokens), atol=1e-5, rtol=1e-5)


def test_reading_without_attention_scores_is_bit_equal(bridge, tokens):
    names = [n for n in bridge.hook_dict if not n.endswith(("hook_pattern", "hook_attn_scores"))]
    logits, _ = bridge.run_with_cache(tokens, names_filter=names)
    assert torch.equal(logits, bridge(tokens))


def test_no_module_is_replaced_and_no_weight_copied(hf, tokens):
    modules, parameters = dict(hf.named_modules()), dict(hf.named_parameters())
    pointers = {name: p.data_ptr() for name, p in parameters.items()}
    bridge = TransformerBridge(hf)
    bridge.run_with_cache(tokens)
    assert bridge.original_model is hf
    assert dict(hf.named_modules()) == modules
    assert {name: p.data_ptr() for name, p in hf.named_parameters()} == pointers
    assert [id(p) for p in bridge.parameters()] == [id(p) for p in hf.parameters()]


def test_state_dict_is_the_models_own(hf, bridge):
    ours, theirs = bridge.state_dict(), hf.state_dict()
    assert list(ours) == list(theirs)
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)
    changed = {name: torch.zeros_like(value) for name, value in theirs.items()}
    bridge.load_state_dict(changed)
    assert all((p == 0).all() for p in hf.parameters())
    assert [n for n, _ in bridge.named_parameters()] == [n for n, _ in hf.named_parameters()]


def test_modes_and_moves_are_the_models_own(hf, bridge):
    assert bridge.training is False
    assert bridge.train() is bridge
    assert hf.training
    assert bridge.training
    hf.eval()
    assert not bridge.training
    assert bridge.to(torch.float64) is bridge
    assert next(hf.parameters()).dtype == torch.float64
    assert bridge.cfg.dtype == torch.float64
    bridge.to("meta")
    assert bridge.cfg.device.type == "meta"


@pytest.mark.parametrize("when", ["before", "after", "while"])
def test_copies_and_pickles(family, when, tokens):
    hf = tiny(family)
    bridge = TransformerBridge(hf)
    plain = bridge(tokens)
    if when == "after":
        bridge.run_with_cache(tokens)
    if when == "while":
        bridge.add_hook(lambda name: True, lambda x, hook: x * 0)
    stored = io.BytesIO()
    torch.save(bridge, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(bridge),
        pickle.loads(pickle.dumps(bridge)),
        torch.load(stored, weights_only=False),
    ):
        assert torch.equal(other(tokens), plain)
        assert other.original_model is not hf
        assert not torch.equal(
            other.run_with_hooks(
                tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x + 9)]
            ),
            plain,
        )
        other.run_with_cache(tokens)
        assert torch.equal(other(tokens), plain)
    copied = copy.deepcopy(hf)
    assert torch.equal(copied(tokens).logits, plain)
    assert torch.equal(pickle.loads(pickle.dumps(hf))(tokens).logits, plain)
    bridge.reset_hooks()
    assert torch_hooks(hf) == 0
    assert torch.equal(bridge(tokens), plain)


def test_save_pretrained_after_hooked_runs(bridge, tokens, tmp_path):
    bridge.run_with_cache(tokens)
    bridge.original_model.save_pretrained(tmp_path)
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, bridge(tokens)
    )


def test_subclass_and_headless_models_are_recognised(tokens):
    class Mine(type(tiny("llama"))):
        pass

    mine = Mine(tiny("llama").config).eval()
    assert torch.equal(TransformerBridge(mine)(tokens), mine(tokens).logits)
    headless = tiny("gpt2").transformer
    bridge = TransformerBridge(headless)
    assert torch.equal(bridge(tokens), headless(tokens).last_hidden_state)
    assert torch.equal(
        bridge.run_with_cache(tokens)[1]["ln_final.hook_normalized"],
        bridge.run_with_cache(tokens)[0],
    )


def test_unknown_model_class_is_refused():
    from adapters import UnsupportedModelError

    with pytest.raises(
        UnsupportedModelError,
        match=r"Linear is not a transformers model, and does not run on tokens",
    ):
        TransformerBridge(torch.nn.Linear(2, 2))
    with pytest.raises(
        UnsupportedModelError,
        match=(
            r"Linear is not a PreTrainedModel of transformers, and there is no adapter for Linear\."
            r" docs/lookup.md"
        ),
    ):
        TransformerBridge(torch.nn.Linear(2, 2), automatic=False)


# transformers calls a method of its own that it has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_and_gradient_checkpointing_and_training(tokens):
    from peft import LoraConfig, get_peft_model

    hf = tiny("llama")
    plain = hf(tokens).logits
    bridge = TransformerBridge(
        get_peft_model(hf, LoraConfig(target_modules=["q_proj", "o_proj"], r=2))
    )
    bridge.eval()
    assert torch.equal(bridge(tokens), plain)
    _, cache = bridge.run_with_cache(tokens)
    assert cache["blocks.0.attn.hook_q"].shape == (2, 9, 4, 8)
    _, fine = bridge.run_with_cache(
        tokens, names_filter=["blocks.1.attn.hook_result", "blocks.1.hook_attn_out"]
    )
    torch.testing.assert_close(
        fine["blocks.1.attn.hook_result"].sum(-2), fine["blocks.1.hook_attn_out"]
    )

    bridge.train()
    bridge.original_model.enable_input_require_grads()
    checkpoint(hf)
    bridge(tokens, return_type="loss").backward()
    assert any(p.grad is not None for n, p in bridge.named_parameters() if "lora" in n)


# What torch.compile looks at while it compiles is no business of ours.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_compile(tokens):
    hf = tiny("gpt2")
    compiled = torch.compile(hf, backend="eager")
    bridge = TransformerBridge(hf)
    torch.testing.assert_close(compiled(tokens).logits, bridge(tokens))
    bridge.run_with_cache(tokens)
    torch.testing.assert_close(compiled(tokens).logits, bridge(tokens))


def test_device_map_and_offload(tmp_path, tokens):
    from accelerate import cpu_offload

    hf = tiny("gpt2")
    plain = hf(tokens).logits
    bridge = TransformerBridge(cpu_offload(hf, execution_device="cpu"))
    assert torch.equal(bridge(tokens), plain)
    halved = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_resid_mid", lambda x, hook: x * 0.5)]
    )
    fresh = TransformerBridge(tiny("gpt2"))
    assert torch.equal(
        halved,
        fresh.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.hook_resid_mid", lambda x, hook: x * 0.5)]
        ),
    )
    residual = bridge(tokens, stop_at_layer=2)
    assert torch.equal(bridge(residual, start_at_layer=2), plain)
