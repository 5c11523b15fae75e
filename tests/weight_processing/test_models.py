"""Processed models of all families: the same function, and what each transform promises."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.processing import Memory, extra_memory
from bridge import TransformerBridge
from tests.weight_processing.models import CASES, copies, log_probs, processed, same, tiny, tokens
from weight_processing.check import ProcessingError
from weight_processing.limits import is_as_left
from weight_processing.parts import ProcessedParts
from weight_processing.saving import SavedBiases
from weight_processing.steps import TRANSFORMS


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
    parts, done = ProcessedParts(bridge.weights), bridge.cfg.processed
    assert not parts.undeclared()
    assert bridge.architecture.norm_kind
    centered = bridge.architecture.norm_kind.centered
    assert done["fold_ln"] == "done"
    assert (done["fold_value_biases"] == "done") == (parts.attn.sinks is None)
    assert bridge.cfg.normalization_type == ("LNPre" if centered else "RMSPre")
    for norm in parts.norms:
        assert parts.is_plain(norm)
        for reader in norm.readers:
            assert not norm.kind.centered or reader.weight().mean(-2).abs().max() < 1e-6
    for name, _ in parts.blocks if parts.attn.sinks is None else ():
        assert not parts.get(parts.find(f"{name}.attn", "b_V"))().any()
    if centered:
        for name, get in parts.writers.items():
            assert get().mean(-1).abs().max() < 1e-6, name
    assert (done.get("center_writing_weights") == "done") == centered
    if done["center_unembed"] == "done":
        assert bridge.W_U.mean(-1).abs().max() < 1e-6
        assert abs(bridge.b_U.mean()) < 1e-6
    assert (done["center_unembed"] == "done") == (bridge.cfg.output_logits_soft_cap <= 0)


#: What reads the norm before a mixture, and which axis of it is d_model.
READERS = {
    "gpt_oss-gqa": {"router.weight": 1, "experts.gate_up_proj": 1},
    "qwen2_moe-gqa": {
        "gate.weight": 1,
        "experts.gate_up_proj": 2,
        "shared_expert_gate.weight": 1,
        "shared_expert.gate_proj.weight": 1,
        "shared_expert.up_proj.weight": 1,
    },
}


@pytest.mark.parametrize("case", READERS)
def test_the_norm_before_a_mixture_is_folded_into_all_that_reads_it(case: str) -> None:
    model = tiny(case, torch.float64)
    model.set_experts_implementation("eager")  # torch has no grouped product in float64
    raw = copies(model)
    TransformerBridge(model).process_weights(
        center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    for name, value in model.state_dict().items():
        if ".mlp." in name:
            layer, part = name.split(".mlp.")
            weight = raw[f"{layer}.post_attention_layernorm.weight"]
            axis = READERS[case].get(part)
            right = (
                raw[name]
                if axis is None
                else raw[name].mul(weight.view(-1, *[1] * (raw[name].ndim - axis - 1)))
            )
            assert torch.equal(value, right), name


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 262_144])
def test_a_mean_over_a_large_vocabulary_that_rounding_keeps_in_part(
    vocabulary: int, dtype: torch.dtype
) -> None:
    """The weights are as centring leaves them, and as it left them in whatever type they are
    converted to.
    """
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=vocabulary,
    )
    torch.manual_seed(0)
    bridge = TransformerBridge(LlamaForCausalLM(config).to(dtype).eval())
    raw = bridge.W_U.detach().clone()
    assert not is_as_left(ProcessedParts(bridge.weights), "center_unembed")
    bridge.process_weights(check=False)
    # The mean that is left is no more than half a step of each number.
    assert (
        bridge.W_U.double().mean(-1).abs().max()
        <= raw.double().abs().mean(-1).max() * torch.finfo(dtype).eps
    )
    done = {name for name, state in bridge.cfg.processed.items() if state == "done"}
    assert done == {"fold_ln", "center_unembed", "fold_value_biases"}
    for converted in (torch.float32, torch.float16, dtype):
        bridge.to(converted)
        assert bridge.cfg.processed["center_unembed"] == "done", converted
    with torch.no_grad():
        bridge.W_U.copy_(raw)
    assert bridge.cfg.processed == {}
    bridge.to(torch.float32)
    assert bridge.cfg.processed == {}


def test_one_plus_the_weight_is_not_rounded() -> None:
    """Gemma's norms add one to their weight in float32, also where that is stored in half
    precision.
    """
    model = tiny("gemma-mqa", torch.bfloat16)
    layer = model.model.layers[0]
    right = layer.mlp.up_proj.weight.float() * (1 + layer.post_attention_layernorm.weight.float())
    TransformerBridge(model).process_weights()
    assert torch.equal(layer.mlp.up_proj.weight, right.bfloat16())


def test_a_weight_that_rounds_to_one_is_no_weight_of_one() -> None:
    bridge = TransformerBridge(tiny("gemma-mqa", torch.bfloat16))
    bridge.process_weights()
    with torch.no_grad():
        bridge.original_model.model.norm.weight.fill_(1e-3)
    before = bridge.W_U.clone()
    bridge.process_weights()
    assert not torch.equal(bridge.W_U, before)


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


def test_refactoring_a_head_that_does_nothing() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[:, :8] = 0.0
        model.transformer.h[1].attn.c_proj.weight[8:16] = 0.0
    before, bridge = log_probs(model), TransformerBridge(model)
    bridge.process_weights(refactor_factored_attn_matrices=True, check="each")
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)
    values = copies(model)
    bridge.process_weights(refactor_factored_attn_matrices=True)
    assert same(model, values)


@pytest.mark.parametrize(
    "order",
    [("fold_value_biases", "fold_ln"), ("center_unembed", "fold_ln", "center_writing_weights")],
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
    bridge.process_weights(
        fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
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
    assert all(
        p.data_ptr() == places[name] for name, p in model.named_parameters() if name in places
    )
    assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
    assert len(list(model.parameters())) == len(places) + 2  # unembedding and its bias
    model(tokens()).logits.sum().backward()
    assert model.lm_head.bias.grad is not None


def test_memory() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_embd=192, n_layer=4, n_head=4, vocab_size=5000, n_positions=64)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    extra, untied = extra_memory(model)
    assert extra < 0.15
    assert 0.2 < untied < 0.5


def test_few_tensors_are_held_at_a_time() -> None:
    """Small ones that are kept between large ones that are freed would keep the heap from being
    used again.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=5000, n_positions=16)
    )
    bridge = TransformerBridge(model)
    parts, most = ProcessedParts(bridge.weights), 0

    class Counted(Memory):
        def __torch_dispatch__(self, *args, **kwargs):
            nonlocal most
            result = super().__torch_dispatch__(*args, **kwargs)
            most = max(most, len(self.alive))
            return result

    assert bridge.W_U.numel() / parts.piece > 50  # pieces that are worked on in turn
    with torch.no_grad(), Counted(model):
        for step in ("fold_ln", "center_writing_weights", "center_unembed"):
            TRANSFORMS[step].do(parts, SavedBiases(model))
    assert most < 12


def test_a_difference_is_an_error_that_names_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    from weight_processing import steps

    wrong = steps.center_unembed
    monkeypatch.setattr(steps, "center_unembed", lambda W, *mean: wrong(W, *mean) * 1.01)
    with pytest.raises(
        ProcessingError, match=r"through center_unembed\. The model's weights have been changed"
    ):
        TransformerBridge(tiny("gpt2")).process_weights(check="each")
    with pytest.raises(
        ProcessingError, match="one of fold_ln, center_writing_weights, center_unembed, fold_value"
    ):
        TransformerBridge(tiny("gpt2")).process_weights()
    TransformerBridge(tiny("gpt2")).process_weights(check=False)
