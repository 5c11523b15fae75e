"""Options that move what attention or a norm computes: against Hugging Face's attentions and plain
torch hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters import verify
from bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from tests.tiny_models import Task, tiny_model

TOKENS = torch.tensor([[5, 9, 33, 4, 71, 17, 8, 60], [3, 88, 12, 6, 41, 20, 7, 54]])
#: Of each type: its options, and the module that makes queries of the first block.
CASES: list[tuple[str, Task, dict[str, Any], str]] = [
    ("olmo", "causal", {"clip_qkv": 1.0}, "model.layers.0.self_attn.q_proj"),
    (
        "olmo",
        "causal",
        {"clip_qkv": 1.0, "num_key_value_heads": 1},
        "model.layers.0.self_attn.q_proj",
    ),
    (
        "olmoe",
        "causal",
        {"clip_qkv": 1.0, "num_key_value_heads": 1, "attention_bias": True, "norm_topk_prob": True},
        "model.layers.0.self_attn.q_proj",
    ),
    ("stablelm", "causal", {"qk_layernorm": True}, "model.layers.0.self_attn.q_proj"),
    (
        "stablelm",
        "causal",
        {"qk_layernorm": True, "num_key_value_heads": 1},
        "model.layers.0.self_attn.q_proj",
    ),
    ("doge", "causal", {}, "model.layers.0.self_attn.q_proj"),
    ("doge", "causal", {"num_key_value_heads": 1}, "model.layers.0.self_attn.q_proj"),
    (
        "xmod",
        "masked",
        {"pre_norm": True, "ln_before_adapter": False},
        "roberta.encoder.layer.0.attention.self.query",
    ),
    ("mimo_v2_flash", "causal", {}, "model.layers.0.self_attn.q_proj"),
]


def _edited_by_torch(model: PreTrainedModel, path: str, edit: Callable[[Tensor], Tensor]) -> Tensor:
    """The logits with what a module puts out edited by a plain hook, before anything writes over
    it.
    """
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, args, output: edit(output)
    )
    try:
        with torch.no_grad():
            logits: Tensor = model(TOKENS).logits
    finally:
        handle.remove()
    return logits


@pytest.mark.parametrize(("model_type", "task", "options", "path"), CASES)
def test_attention_with_options(
    model_type: str, task: Task, options: dict[str, Any], path: str
) -> None:
    model = tiny_model(model_type, task, **options)
    eager = tiny_model(model_type, task, attn_implementation="eager", **options)
    bridge = TransformerBridge(model, cache_declaration=False)
    assert verify(bridge).passed
    with torch.no_grad():
        attentions = eager(TOKENS, output_attentions=True).attentions
    queries: list[Tensor] = []
    logits = _edited_by_torch(eager, path, lambda x: queries.append(x.clone()))
    shown, cache = bridge.run_with_cache(TOKENS)
    torch.testing.assert_close(shown, logits, atol=1e-4, rtol=1e-4)
    for layer, attention in enumerate(attentions):
        torch.testing.assert_close(
            cache[f"blocks.{layer}.attn.hook_pattern"], attention, atol=1e-5, rtol=1e-4
        )
    q = cache["blocks.0.attn.hook_q"]
    torch.testing.assert_close(q.flatten(2), queries[0].flatten(2), atol=1e-5, rtol=1e-4)

    columns = (
        torch.arange(q.shape[-1]) < q.shape[-1] // 2
    )  # a factor alone is nothing to a norm behind

    def halve(x: Tensor, hook: HookPoint) -> Tensor:
        return torch.where(columns, x * 0.5, x)

    made = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_q", halve)])
    assert not torch.allclose(made, shown, atol=1e-4)
    flat = columns.repeat(q.shape[-2])
    expected = _edited_by_torch(eager, path, lambda x: torch.where(flat, x * 0.5, x))
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


def test_a_bias_of_an_rms_norm_is_kept_by_an_edit() -> None:
    model = tiny_model("xlstm", use_bias=True)
    bridge = TransformerBridge(model, cache_declaration=False)
    norm: nn.Module = model.get_submodule("backbone.blocks.0.norm_mlstm")
    weight, bias = norm.weight, norm.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor) and bool((bias != 0).any())
    expected = _edited_by_torch(
        model, "backbone.blocks.0.norm_mlstm", lambda y: (y - bias) * 0.5 + bias
    )
    made = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.ln1.hook_normalized", lambda x, hook: x * 0.5)]
    )
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


def test_gemma_3_with_images_leaves_out_the_soft_cap_of_its_text() -> None:
    from transformers import Gemma3ForConditionalGeneration

    from tests.tiny_models import config_for, tiny_of

    config = config_for(Gemma3ForConditionalGeneration)
    config.text_config.final_logit_softcapping = 5.0
    bridge = TransformerBridge(tiny_of(Gemma3ForConditionalGeneration, config))
    assert bridge.cfg.output_logits_soft_cap == -1.0 and verify(bridge).passed


def test_a_class_that_ties_nothing_says_so() -> None:
    bridge = TransformerBridge(
        tiny_model("musicgen", tie_word_embeddings=True), cache_declaration=False
    )
    assert not bridge.cfg.tie_word_embeddings


def test_one_key_head_with_a_mask_of_each_head_generates() -> None:
    """transformers packs the heads of one new token into positions, and the mask with them."""
    model = tiny_model("doge", num_key_value_heads=1)
    bridge = TransformerBridge(model, cache_declaration=False)
    patterns: list[Tensor] = []
    expected = model.generate(TOKENS[:, :5], max_new_tokens=3, do_sample=False)
    with bridge.hooks([("blocks.1.attn.hook_pattern", lambda x, hook: patterns.append(x.clone()))]):
        made = bridge.generate(TOKENS[:, :5], max_new_tokens=3, do_sample=False)
    assert torch.equal(made, expected)
    whole = bridge.run_with_cache(made[:, :-1])[1]["blocks.1.attn.hook_pattern"]
    for pattern, at in zip(patterns[1:], (5, 6), strict=True):
        torch.testing.assert_close(
            pattern[:, :, 0], whole[:, :, at, : at + 1], atol=1e-5, rtol=1e-4
        )


def test_blocks_that_are_not_known_inside_say_in_which_direction_they_read() -> None:
    bridge = TransformerBridge(tiny_model("xmod", ln_before_adapter=False), cache_declaration=False)
    assert not bridge.architecture.stack.block.steps and bridge.cfg.attention_dir == "bidirectional"
    with pytest.raises(ValueError, match="reads in both directions"):
        bridge.generate(TOKENS, max_new_tokens=2, return_cache=True)
    assert (
        TransformerBridge(tiny_model("mamba"), cache_declaration=False).cfg.attention_dir
        == "causal"
    )
