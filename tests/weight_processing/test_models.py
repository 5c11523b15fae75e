"""Processed models of all families: the same function, and what each transform promises."""

from __future__ import annotations

import pytest
import torch

from benchmarks.processing import extra_memory
from bridge import TransformerBridge
from bridge.processing import ProcessingError
from bridge.processing_parts import Parts
from tests.weight_processing.models import CASES, copies, log_probs, processed, same, tiny, tokens


@pytest.mark.parametrize("case", CASES)
def test_same_function_and_every_promise(case: str) -> None:
    model = tiny(case)
    before, bridge, parts_before = (
        log_probs(model),
        TransformerBridge(model),
        [name for name, _ in model.named_modules()],
    )
    keys = set(model.state_dict())
    bridge.process_weights(check="each")
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)
    assert [name for name, _ in model.named_modules()] == parts_before
    assert keys <= set(model.state_dict())
    parts, done = Parts(bridge.weights), bridge.cfg.processed
    assert not parts.undeclared()
    assert done["fold_ln"] == done["fold_value_biases"] == "done"
    assert bridge.cfg.normalization_type == ("LNPre" if parts.block.norm.centered else "RMSPre")
    for norm in parts.norms:
        assert parts.is_plain(norm)
        for reader in norm.readers:
            assert not norm.kind.centered or reader.weight().mean(-2).abs().max() < 1e-6
    for name, _ in parts.blocks:
        assert not parts.get(parts.find(f"{name}.attn", "b_V"))().any()
    if parts.block.norm.centered:
        for name, get in parts.writers.items():
            assert get().mean(-1).abs().max() < 1e-6, name
    assert (done.get("center_writing_weights") == "done") == parts.block.norm.centered
    if done["center_unembed"] == "done":
        assert bridge.W_U.mean(-1).abs().max() < 1e-6
        assert abs(bridge.b_U.mean()) < 1e-6
    assert (done["center_unembed"] == "done") == (bridge.cfg.output_logits_soft_cap <= 0)


@pytest.mark.parametrize("case", CASES)
def test_twice_is_once(case: str) -> None:
    bridge = processed(case)
    values, done = copies(bridge.original_model), dict(bridge.cfg.processed)
    bridge.process_weights()
    again = TransformerBridge(bridge.original_model)
    again.enable_compatibility_mode()
    assert same(bridge.original_model, values)
    assert bridge.cfg.processed == again.cfg.processed == done
    assert again.cfg.normalization_type == bridge.cfg.normalization_type


@pytest.mark.parametrize("case", ["gpt2", "gptj", "phi", "gpt_neo", "gpt_neox", "opt-no-bias"])
def test_in_float64_to_rounding(case: str) -> None:
    model = tiny(case, torch.float64)
    with torch.no_grad():
        before = model(tokens()).logits.log_softmax(-1)
        TransformerBridge(model).process_weights(check=False)
        after = model(tokens()).logits.log_softmax(-1)
    torch.testing.assert_close(after, before, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["gpt2", "llama", "gemma-mqa", "gptj"])
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    bridge = TransformerBridge(tiny(case, dtype))
    exact = TransformerBridge(tiny(case, dtype).float())
    for one in (bridge, exact):
        one.process_weights(check=True)
    # Computed in float32 and rounded once for each transform.
    ours, right = bridge.tl_parameters(), exact.tl_parameters()
    for name, value in right.items():
        torch.testing.assert_close(ours[name].float(), value, atol=0.02, rtol=0.02, msg=name)


@pytest.mark.parametrize("case", ["gpt2", "gpt_neo", "bloom", "opt"])
def test_refactored_attention(case: str) -> None:
    model = tiny(case)
    before = log_probs(model)
    bridge = TransformerBridge(model)
    bridge.process_weights(refactor_factored_attn_matrices=True, check="each")
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)
    for block in bridge.blocks:
        W_O = block.attn.W_O
        torch.testing.assert_close(W_O @ W_O.mT, torch.eye(8).expand(4, 8, 8), atol=1e-5, rtol=0)
        assert not block.attn.b_V.any()
    values = copies(model)
    bridge.process_weights(refactor_factored_attn_matrices=True)
    assert same(model, values)


@pytest.mark.parametrize(
    "order", [("fold_value_biases", "fold_ln"), ("center_unembed", "fold_ln", "center_writing_weights")]
)
@pytest.mark.parametrize("case", ["gpt2", "gptj", "gpt_neo"])
def test_one_transform_after_the_other(case: str, order: tuple[str, ...]) -> None:
    steps = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    bridge, at_once = TransformerBridge(tiny(case)), processed(case)
    for name in (*order, *(step for step in steps if step not in order)):
        bridge.process_weights(**{step: step == name for step in steps})
    right = at_once.tl_parameters()
    for name, value in bridge.tl_parameters().items():
        torch.testing.assert_close(value, right[name], atol=1e-5, rtol=1e-5, msg=name)


def test_nothing_asked_nothing_done() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    values = copies(bridge.original_model)
    bridge.process_weights(False, False, False, False)
    bridge.enable_compatibility_mode(no_processing=True)
    assert same(bridge.original_model, values)
    assert bridge.cfg.processed == {}
    assert bridge.cfg.tie_word_embeddings


def test_only_value_biases_leave_embeddings_tied() -> None:
    bridge = processed("gpt2", fold_ln=False, center_writing_weights=False, center_unembed=False)
    assert bridge.original_model.lm_head.weight is bridge.original_model.transformer.wte.weight
    assert bridge.cfg.normalization_type == "LN"


def test_new_weights_are_processed_anew() -> None:
    bridge, raw = TransformerBridge(tiny("phi")), copies(tiny("phi"))
    bridge.process_weights()
    right = copies(bridge.original_model)
    bridge.load_state_dict(raw)
    bridge.process_weights()
    for name, value in bridge.state_dict().items():
        torch.testing.assert_close(value, right[name], atol=1e-6, rtol=1e-6)


def test_a_new_model_from_a_processed_ones_configuration_is_raw() -> None:
    config = processed("gpt2").original_model.config
    torch.manual_seed(0)
    fresh = TransformerBridge(type(tiny("gpt2"))(config))
    assert fresh.cfg.processed == {}
    assert fresh.cfg.normalization_type == "LN"


def test_parameters_stay_where_they_are() -> None:
    model = tiny("gpt2")
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.train().named_modules()}
    bridge = TransformerBridge(model)
    fired = []
    bridge.add_hook("blocks.0.hook_resid_pre", lambda x, hook: fired.append(hook.name))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        bridge.process_weights()
    assert not fired  # by the check
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(p.data_ptr() == places[name] for name, p in model.named_parameters() if name in places)
    assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
    assert len(list(model.parameters())) == len(places) + 2  # unembedding and its bias
    model(tokens()).logits.sum().backward()
    assert model.lm_head.bias.grad is not None


def test_memory() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=192, n_layer=4, n_head=4, vocab_size=5000, n_positions=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    extra, untied = extra_memory(model)
    assert extra < 0.15
    assert 0.2 < untied < 0.5


def test_a_difference_is_an_error_that_names_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge import processing_steps

    wrong = processing_steps.center_unembed
    monkeypatch.setattr(processing_steps, "center_unembed", lambda W, *mean: wrong(W, *mean) * 1.01)
    with pytest.raises(ProcessingError, match=r"through center_unembed\. The model's weights have been changed"):
        TransformerBridge(tiny("gpt2")).process_weights(check="each")
    with pytest.raises(ProcessingError, match="one of fold_ln, center_writing_weights, center_unembed, fold_value"):
        TransformerBridge(tiny("gpt2")).process_weights()
    TransformerBridge(tiny("gpt2")).process_weights(check=False)
