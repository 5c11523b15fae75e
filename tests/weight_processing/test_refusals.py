"""What cannot be done is known before a weight is written: left out by default, an error by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    GPT2ForSequenceClassification,
    GPT2Model,
    OPTConfig,
    OPTModel,
)

from adapters import Attention, Block, MoE, Step, Weights
from adapters.views import MaskedScores
from bridge import NativeConfig, TransformerBridge
from bridge.native import NativeModel
from tests.adapters.by_hand import families
from tests.reference import DATA
from tests.tiny_models import tiny_model
from tests.weight_processing.models import copies, log_probs, same, tiny
from weight_processing.check import ProcessingError

ALL = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


def left_out(bridge: TransformerBridge, *names: str, match: str) -> None:
    """By default these are left out for this reason, the others are done; by name each is an
    error.
    """
    model = bridge.original_model
    values, tied = copies(model), bridge.cfg.tie_word_embeddings
    for name in names:
        with pytest.raises(
            ProcessingError, match=rf"{name}=True cannot be done for .*{match}.*Nothing was changed"
        ):
            bridge.process_weights(**{name: True})
    assert same(model, values)
    assert bridge.cfg.tie_word_embeddings == tied
    assert bridge.cfg.processed == {}
    bridge.process_weights()
    for name in ALL:
        state = bridge.cfg.processed[name]
        assert (
            (state.startswith("left out: ") and match.replace("\\", "") in state)
            if name in names
            else state == "done"
        )
    if set(names) == set(ALL):
        assert same(model, values)


def native(**fields: Any) -> TransformerBridge:
    values = {
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "d_vocab": 61,
        "n_ctx": 20,
        "act_fn": "gelu",
    } | fields
    model = NativeModel(NativeConfig(**values)).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return TransformerBridge(model)


def test_rms_norms_and_soft_caps() -> None:
    left_out(TransformerBridge(tiny("llama")), "center_writing_weights", match="RMS norms")
    bridge = TransformerBridge(tiny("gemma2-mha-bias"))
    with pytest.raises(ProcessingError, match="soft cap of 2"):
        bridge.process_weights(center_unembed=True)
    bridge.process_weights()
    assert "soft cap of 2" in bridge.cfg.processed["center_unembed"]


@pytest.mark.parametrize("by_name", [{}, {"center_unembed": True}])
def test_encoders(by_name: dict[str, bool]) -> None:
    bridge = TransformerBridge.boot_transformers(str(DATA / "bert"))
    if not by_name:
        left_out(bridge, *ALL, match="not one stack of blocks")
    with pytest.raises(ProcessingError, match="HookedTransformer has no processing for it either"):
        bridge.enable_compatibility_mode(center_unembed=True)


def test_t5() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        d_ff=20,
        num_layers=2,
        vocab_size=61,
        decoder_start_token_id=0,
    )
    left_out(
        TransformerBridge(T5ForConditionalGeneration(config)), *ALL, match="not one stack of blocks"
    )


def test_meta_device() -> None:
    bridge = TransformerBridge.boot_transformers(str(DATA / "gpt2"), load_weights=False)
    bridge.process_weights()
    assert "device meta" in bridge.cfg.processed["fold_ln"]
    with pytest.raises(ProcessingError, match="device meta"):
        bridge.process_weights(fold_ln=True)


def test_quantised() -> None:
    model = tiny("llama")
    model.is_quantized = True
    left_out(TransformerBridge(model), *ALL, match="quantised")

    class Int8(nn.Linear):
        pass

    model = tiny("gpt_oss-gqa")
    model.is_quantized = True
    left_out(TransformerBridge(model), *ALL, match="quantised")

    model = tiny("gpt2")
    model.lm_head.__class__ = Int8
    left_out(TransformerBridge(model), "fold_ln", "center_unembed", match="lm_head is a Int8")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora() -> None:
    import peft

    model = peft.get_peft_model(
        tiny("qwen2"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    ).eval()
    bridge = TransformerBridge(model)
    values, before = copies(model), log_probs(model)
    for name in ("fold_ln", "fold_value_biases"):
        with pytest.raises(ProcessingError, match="merge_and_unload"):
            bridge.process_weights(**{name: True})
    assert same(model, values)
    bridge.process_weights()
    assert [name for name, state in bridge.cfg.processed.items() if state == "done"] == [
        "center_unembed"
    ]
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)
    merged = TransformerBridge(model.merge_and_unload())
    merged.process_weights(fold_ln=True, fold_value_biases=True)
    torch.testing.assert_close(log_probs(merged.original_model), before, atol=2e-5, rtol=1e-5)


def test_attention_sinks() -> None:
    bridge = TransformerBridge(tiny("gpt_oss-gqa"))
    with pytest.raises(ProcessingError, match="do not sum to one"):
        bridge.process_weights(refactor_factored_attn_matrices=True)
    with pytest.raises(ProcessingError, match="RMS norms"):
        bridge.process_weights(center_writing_weights=True)
    b_V = bridge.weights["blocks.0.attn._b_V"].clone()
    with pytest.raises(
        ProcessingError,
        match=r"fold_value_biases=True cannot be done.*do not sum to one.*Nothing was",
    ):
        bridge.process_weights(fold_value_biases=True)
    bridge.process_weights()
    assert bridge.cfg.processed["fold_value_biases"].startswith("left out: it has attention sinks")
    assert torch.equal(bridge.weights["blocks.0.attn._b_V"], b_V) and b_V.any()


@pytest.mark.parametrize(
    ("model_type", "step", "reason"),
    [
        ("deepseek_v3", "center_unembed", "made from latents"),
        ("gemma4", "center_writing_weights", "do not all have heads of one number and width"),
        ("afmoe", "fold_ln", "a gate behind its attention reads the norm, too"),
        (
            "afmoe",
            "fold_value_biases",
            "a gate stands between its values and its output projection",
        ),
        ("phimoe", "fold_ln", r"blocks\.0\.ln2 has a bias and feeds a mixture of experts"),
        ("jamba", "fold_value_biases", "do not have one attention each, the same in all of them"),
    ],
)
def test_what_a_family_forbids(model_type: str, step: str, reason: str) -> None:
    model = tiny_model(model_type)
    values = copies(model)
    bridge = TransformerBridge(model)
    with pytest.raises(
        ProcessingError, match=rf"{step}=True cannot be done for .*{reason}.*Nothing was changed"
    ):
        bridge.process_weights(**{step: True})
    assert same(model, values)


def test_weights_of_types_that_cannot_be_written_to() -> None:
    model = tiny("gpt2")
    model.lm_head.weight = nn.Parameter(
        model.lm_head.weight.to(torch.complex64), requires_grad=False
    )
    with pytest.raises(ProcessingError, match=r"unembed\.W_U is of type torch\.complex64"):
        TransformerBridge(model).process_weights(center_unembed=True)
    with torch.inference_mode():
        model = tiny("gpt2")
    with pytest.raises(ProcessingError, match=r"was made under torch\.inference_mode"):
        TransformerBridge(model).process_weights(center_unembed=True)


def declare(bridge: TransformerBridge, *steps: Step) -> None:
    """Changes what the adapter of a bridge has declared."""
    stack = replace(bridge.architecture.stack, block=Block(steps))
    bridge.__dict__["architecture"] = replace(bridge.architecture, stacks=(stack,))
    bridge.__dict__["_weights"] = lambda: Weights(
        bridge.architecture, bridge.original_model, bridge.cfg
    )


@pytest.mark.parametrize("case", ["gpt_oss-gqa", "qwen2_moe-gqa"])
def test_a_part_of_a_mixture_that_is_not_declared(case: str) -> None:
    """A norm is folded into all that reads it, or into nothing."""
    model = tiny(case)
    bridge = TransformerBridge(model)
    attend, mix = bridge.architecture.stack.block.steps
    assert isinstance(mix.part, MoE) and isinstance(attend.part, Attention)
    if case == "gpt_oss-gqa":
        name = r"self_attn\.sinks"
        attend = replace(attend, part=replace(attend.part, scores=MaskedScores()))
    else:
        name = r"mlp\.shared_expert_gate\.weight"
        mix = replace(mix, part=replace(mix.part, shared_transform=()))
    declare(bridge, attend, mix)
    values = copies(model)
    with pytest.raises(
        ProcessingError, match=f"does not say what these parameters read and write: .*{name}"
    ):
        bridge.process_weights(fold_ln=True)
    assert same(model, values)


def test_what_the_adapter_does_not_declare() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.shared_expert = nn.Linear(32, 32)
    match = (
        r"does not say what these parameters read and write:"
        r" model\.layers\.1\.mlp\.shared_expert\.weight"
    )
    bridge = TransformerBridge(model)
    values = copies(model)
    for name in ("fold_ln", "center_unembed", "fold_value_biases"):
        with pytest.raises(ProcessingError, match=match):
            bridge.process_weights(**{name: True})
    assert same(model, values)
    classifier = GPT2ForSequenceClassification(tiny("gpt2").config)
    bridge = TransformerBridge(classifier)
    with pytest.raises(ProcessingError, match="no output layer"):
        bridge.process_weights(fold_ln=True)
    with pytest.raises(ProcessingError, match=r"read and write: score\.weight"):
        bridge.process_weights(center_writing_weights=True)


def test_parameters_in_two_places() -> None:
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight
    left_out(TransformerBridge(model), *ALL, match="used in more than one place")


def test_parameters_in_the_same_memory() -> None:
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_fc.weight.data = model.transformer.h[0].mlp.c_fc.weight.data
    left_out(TransformerBridge(model), *ALL, match="used in more than one place")


def test_an_embedding_in_a_third_place() -> None:
    model = tiny("gpt2")
    model.transformer.wpe.weight = model.transformer.wte.weight
    left_out(
        TransformerBridge(model),
        *ALL,
        match="transformer.wte.weight is used in more than one place",
    )


def test_a_stream_that_is_read_without_a_norm() -> None:
    config = OPTConfig(**families.OPT | {"word_embed_proj_dim": 32}, _remove_final_layer_norm=True)
    bridge = TransformerBridge(OPTModel(config).eval())
    with pytest.raises(ProcessingError, match="reads the residual stream without a norm"):
        bridge.process_weights(center_writing_weights=True)
    bridge = TransformerBridge(tiny("gpt2"))
    attend, feed_forward = bridge.architecture.stack.block.steps
    declare(bridge, attend, replace(feed_forward, pre=None))
    with pytest.raises(ProcessingError, match="reads the residual stream without a norm"):
        bridge.process_weights(center_writing_weights=True)


def test_refactoring_an_output_whose_bias_has_no_place() -> None:
    model = tiny("opt-no-bias")
    for layer in model.model.decoder.layers:
        layer.self_attn_layer_norm.bias = nn.Parameter(torch.randn(32))
    bridge = TransformerBridge(model)
    bridge.process_weights(check="each")
    assert bridge.blocks[0].attn.b_O.any()
    with pytest.raises(ProcessingError, match="no bias to take up"):
        bridge.process_weights(refactor_factored_attn_matrices=True)


def test_without_an_output_layer() -> None:
    model = GPT2Model(tiny("gpt2").config).eval()
    left_out(TransformerBridge(model), "fold_ln", "center_unembed", match="has no output layer")


@pytest.mark.parametrize(
    ("fields", "names", "match"),
    [
        ({"normalization_type": None}, ("fold_ln",), "no norms"),
        ({"gated_mlp": True, "act_fn": "silu"}, ("fold_ln",), "feeds a gated MLP"),
        ({"final_rms": True}, ("center_writing_weights",), "RMS norms"),
        ({"normalization_type": "RMS"}, ("center_writing_weights",), "RMS norms"),
    ],
)
def test_native(fields: dict[str, Any], names: tuple[str, ...], match: str) -> None:
    bridge = native(**fields)
    if fields.get("normalization_type", "") is None:
        with pytest.raises(ProcessingError, match="without a norm"):
            bridge.process_weights(center_writing_weights=True)
        bridge.process_weights(center_writing_weights=False)
        assert "no norms" in bridge.cfg.processed["fold_ln"]
    else:
        left_out(bridge, *names, match=match)


def test_shortformer() -> None:
    bridge = native(positional_embedding_type="shortformer")
    for name in ("fold_ln", "center_writing_weights"):
        with pytest.raises(ProcessingError, match="position embeddings"):
            bridge.process_weights(**{name: True})
    bridge.process_weights()
    assert bridge.cfg.processed["center_unembed"] == "done"


@pytest.mark.parametrize(
    "fields",
    [
        {"act_fn": "solu_ln"},
        {"normalization_type": "LNPre", "act_fn": "solu_ln"},
        {"normalization_type": "RMSPre"},
        {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"},
        {"attn_only": True, "act_fn": None},
        {"parallel_attn_mlp": True, "positional_embedding_type": "rotary", "n_key_value_heads": 1},
        {"attention_dir": "bidirectional"},
        {"d_head": 20, "d_vocab_out": 7},
    ],
)
def test_native_models_keep_their_function(fields: dict[str, Any]) -> None:
    bridge = native(**fields)
    before = log_probs(bridge.original_model)
    bridge.process_weights(fold_ln=True, center_unembed=True, fold_value_biases=True, check="each")
    torch.testing.assert_close(log_probs(bridge.original_model), before, atol=2e-5, rtol=1e-5)
    values = copies(bridge.original_model)
    bridge.process_weights()
    assert same(bridge.original_model, values)


REFACTOR: list[tuple[Callable[[], TransformerBridge], str]] = [
    (lambda: TransformerBridge(tiny("gpt_neox")), "rotated by their positions"),
    (lambda: TransformerBridge(tiny("phi-gqa-normed")), "rotated by their positions"),
    (lambda: TransformerBridge(tiny("qwen2_moe-gqa")), "rotated by their positions"),
    (lambda: native(n_key_value_heads=1), "2 query heads share 1 heads"),
    (lambda: native(d_head=20), "d_head=20 is more than d_model=16"),
    (lambda: TransformerBridge(tiny("opt-no-bias")), "no bias to take up"),
]


@pytest.mark.parametrize(("make", "match"), REFACTOR)
def test_refactoring(make: Callable[[], TransformerBridge], match: str) -> None:
    bridge = make()
    values = copies(bridge.original_model)
    with pytest.raises(ProcessingError, match=match):
        bridge.process_weights(refactor_factored_attn_matrices=True)
    assert same(bridge.original_model, values)


@pytest.mark.unchecked
def test_wrong_arguments() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    with pytest.raises(TypeError, match="fold_ln is 'yes'; it must be True or False"):
        bridge.process_weights(fold_ln="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check is 'all'; it must be True, False or 'each'"):
        bridge.process_weights(check="all")  # type: ignore[arg-type]


def test_a_model_of_sound_without_tokens_or_an_output_layer() -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    model = ASTForAudioClassification(
        ASTConfig(**sizes, max_length=64, num_mel_bins=32, num_labels=5)
    ).eval()
    bridge = TransformerBridge(model)
    left_out(
        bridge, "fold_ln", "center_unembed", match="ASTForAudioClassification has no output layer"
    )
