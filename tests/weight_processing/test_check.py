"""The comparison before and after: what it finds, in half precision too, and what an error leaves
behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from benchmarks.processing import Memory, bytes_of
from bridge import TransformerBridge
from tests.weight_processing.models import CASES, copies, log_probs, same, tiny, tokens
from weight_processing import check, steps
from weight_processing.check import InFloat32, LogProbCheck, ProcessingError

HALF = [torch.bfloat16, torch.float16]
FOLD, UNEMBED, VALUES = steps.fold_layer_norm, steps.center_unembed, steps.fold_value_biases


def in_half(case: str, dtype: torch.dtype) -> Any:
    model = tiny(case, dtype)
    if "moe" in case or "oss" in case or "mixtral" in case:
        model.set_experts_implementation(
            "eager"
        )  # the default one cannot multiply such narrow matrices in half
    return model


@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_rounding_is_no_difference(case: str, dtype: torch.dtype) -> None:
    bridge = TransformerBridge(in_half(case, dtype))
    bridge.process_weights(check="each")
    assert bridge.cfg.processed["fold_ln"] == "done"


def without_weight(W: Tensor, w: Tensor | None, *more: Any) -> tuple[Tensor, Tensor | None]:
    return (
        FOLD(W, None if w is None else torch.ones_like(w), None, more[1])[0],
        FOLD(W, w, *more)[1],
    )


def a_little_large(W: Tensor, *more: Any) -> tuple[Tensor, Tensor | None]:
    folded, bias = FOLD(W, *more)
    return folded * 1.03, bias


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("step", "name", "wrong"),
    [
        ("fold_ln", "fold_layer_norm", without_weight),
        ("fold_ln", "fold_layer_norm", a_little_large),
        ("center_unembed", "center_unembed", lambda W, *mean: UNEMBED(W, *mean) * 1.03),
        ("fold_value_biases", "fold_value_biases", lambda b_V, W_O: 0 * VALUES(b_V, W_O)),
        ("fold_value_biases", "fold_value_biases", lambda b_V, W_O: -VALUES(b_V, W_O)),
    ],
)
@pytest.mark.parametrize("case", ["gpt2", "llama-bias", "phi", "qwen2"])
def test_a_wrong_transform_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    step: str,
    name: str,
    wrong: Callable[..., Any],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(steps, name, wrong)
    with pytest.raises(
        ProcessingError, match=rf"through {step}\. The model's weights have been changed"
    ):
        TransformerBridge(tiny(case, dtype)).process_weights(check="each")
    with pytest.raises(ProcessingError, match=r"through one of fold_ln, .*check='each' says which"):
        TransformerBridge(tiny(case, dtype)).process_weights()
    TransformerBridge(tiny(case, dtype)).process_weights(check=False)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "case", ["gpt2", "gpt_neo", "gptj", "bloom", "opt", "gemma-mqa", "mixtral-gqa"]
)
def test_half_precision_weights_in_float32(case: str, dtype: torch.dtype) -> None:
    model, exact = in_half(case, dtype), in_half(case, dtype).float()
    with torch.no_grad(), InFloat32():
        logits = model(tokens()).logits
    with torch.no_grad():
        torch.testing.assert_close(logits, exact(tokens()).logits, atol=2e-6, rtol=1e-6)
    assert all(parameter.dtype == dtype for parameter in model.parameters())


def test_the_check_in_half_precision_holds_one_piece_in_float32() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=40000, n_positions=64)
    ).bfloat16()
    cfg = TransformerBridge(model).cfg
    with torch.no_grad(), Memory(model) as memory:
        LogProbCheck(model, cfg)
    logits = 2 * 16 * 40000 * 4
    assert memory.peak < 0.4 * bytes_of(model) + 5 * logits  # all of the unembedding would be 1.7


def test_kernels_for_half_precision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert query.dtype == torch.bfloat16, "only half precision"
        return eager_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("half_only", forward)
    AttentionMaskInterface.register("half_only", eager_mask)
    try:
        model = tiny("llama", torch.bfloat16)
        model.config._attn_implementation = "half_only"
        TransformerBridge(model).process_weights()
        assert model.config._attn_implementation == "half_only"
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            del interface._global_mapping["half_only"]


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("one_setting", [False, True])
def test_products_that_the_user_lets_be_rounded(
    monkeypatch: pytest.MonkeyPatch, precision: str, one_setting: bool
) -> None:
    if one_setting:  # as in older versions of torch
        monkeypatch.setattr(check, "_BACKENDS", ())
    torch.set_float32_matmul_precision(precision)
    try:
        found = LogProbCheck(model := tiny("llama"), TransformerBridge(model).cfg)
        assert found.rounds
        TransformerBridge(model).process_weights(check="each")
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_that_one_backend_lets_be_rounded() -> None:
    backend = torch.backends.cuda.matmul
    found = backend.fp32_precision
    backend.fp32_precision = "tf32"  # after which torch.get_float32_matmul_precision is an error
    try:
        TransformerBridge(tiny("llama")).process_weights(check="each")
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = found


def test_a_backend_that_follows_the_setting_for_all_still_does() -> None:
    backend, found = torch.backends.cuda.matmul, torch.backends.fp32_precision
    before = backend.fp32_precision
    torch.backends.fp32_precision, backend.fp32_precision = "tf32", "none"
    try:
        assert backend.fp32_precision == "tf32"
        TransformerBridge(tiny("llama")).process_weights()
        assert backend.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert backend.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision, backend.fp32_precision = found, before


def test_what_cannot_be_compared() -> None:
    model = tiny("llama", torch.float16)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
    bridge, values = TransformerBridge(model), copies(model)
    with pytest.raises(
        ProcessingError, match=r"are not finite.*Nothing was changed\. With check=False"
    ):
        bridge.process_weights()
    assert same(model, values)
    assert bridge.cfg.processed == {}


def test_an_error_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2").train()
    bridge, values = TransformerBridge(model), copies(model)

    def fail(*args: Any) -> None:
        raise RuntimeError("no memory")

    handle = model.transformer.h[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        bridge.process_weights()
    handle.remove()
    assert same(model, values)
    assert all(module.training for module in model.modules())
    assert model.config.tie_word_embeddings
    assert bridge.cfg.processed == {}
    bridge.process_weights()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    model = tiny("phi")
    before, raw = log_probs(model), copies(model)
    bridge = TransformerBridge(model)
    calls = []

    def fold(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise error("in the middle")
        return FOLD(*args)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "fold_layer_norm", fold)
        with pytest.raises(error, match="in the middle") as caught:
            bridge.process_weights()
    assert caught.value.__notes__ == ["The model's weights are processed in part: load them again."]
    assert bridge.cfg.processed == {}
    half_done = copies(model)
    for again in (bridge, TransformerBridge(model), TransformerBridge(copy.deepcopy(model))):
        for choices in ({}, {"fold_ln": True}):
            with pytest.raises(ProcessingError, match="an earlier call did not finish"):
                again.process_weights(**choices)
    assert same(model, half_done)
    bridge.load_state_dict(raw)
    bridge.process_weights()
    torch.testing.assert_close(log_probs(model), before, atol=2e-5, rtol=1e-5)


def test_after_a_difference_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    with monkeypatch.context() as patch:
        patch.setattr(steps, "center_unembed", lambda W, *mean: UNEMBED(W, *mean) * 1.5)
        with pytest.raises(ProcessingError, match="log probabilities changed by"):
            bridge.process_weights()
    with pytest.raises(ProcessingError, match="an earlier call did not finish"):
        bridge.process_weights()  # which would find no difference to what is wrong by now
    assert bridge.cfg.processed == {}


def test_under_another_default_device() -> None:
    bridge = TransformerBridge(tiny("gpt2"))
    with torch.device("meta"):
        bridge.process_weights(check="each")
    assert bridge.cfg.processed["fold_ln"] == "done"
