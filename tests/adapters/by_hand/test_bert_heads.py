"""BERT's pooler and next-sentence head against a computation by hand; runs that start or stop at a
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bridge import TransformerBridge, UnknownHookError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
}
TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(2))
POOLED, NSP = "pooler.hook_pooler_out", "nsp_head.hook_nsp_out"


@cache
def tiny(cls: str) -> TransformerBridge:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, cls)(transformers.BertConfig(**SIZES))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0.0, 0.3)
                if "LayerNorm.weight" in name:
                    parameter.add_(1.0)
    return TransformerBridge(model.eval())


def heads_by_hand(
    cls: str, final: Tensor, edits: dict[str, Callable[[Tensor], Tensor]]
) -> dict[str, Tensor]:
    """Both heads from the last block's output, ``[batch, pos, d_model]``, in float64."""
    weights = {
        name: value.double() for name, value in tiny(cls).original_model.state_dict().items()
    }

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]

    def edited(name: str, x: Tensor) -> Tensor:
        return edits.get(name, torch.clone)(x)

    pooled = edited(POOLED, linear("bert.pooler.dense", final.double()[:, 0]).tanh())
    return {POOLED: pooled, NSP: edited(NSP, linear("cls.seq_relationship", pooled))}


def next_sentence(output: Any) -> Tensor:
    return (
        output.seq_relationship_logits
        if hasattr(output, "seq_relationship_logits")
        else output.logits
    )


def run(bridge: TransformerBridge, hooks: list[Any]) -> Tensor:
    with bridge.hooks(fwd_hooks=hooks):
        return next_sentence(bridge.original_model(input_ids=TOKENS))


@pytest.mark.parametrize("cls", ["BertForNextSentencePrediction", "BertForPreTraining"])
@pytest.mark.parametrize("halved", ["blocks.2.hook_normalized_resid_post", POOLED, NSP])
def test_heads(cls: str, halved: str) -> None:
    def half(x: Tensor) -> Tensor:
        return x * 0.5

    bridge, names = tiny(cls), ["blocks.2.hook_normalized_resid_post", POOLED, NSP]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, names_filter=names)
        final = cache[names[0]]
        right = heads_by_hand(cls, final, {})
        for name in (POOLED, NSP):
            torch.testing.assert_close(cache[name].double(), right[name], atol=1e-5, rtol=1e-5)
        assert cache[POOLED].shape == (2, 32) and cache[NSP].shape == (2, 2)
        logits = run(bridge, [(halved, lambda x, hook: x * 0.5)])
    edited = heads_by_hand(cls, half(final) if halved == names[0] else final, {halved: half})[NSP]
    torch.testing.assert_close(logits.double(), edited, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(edited, right[NSP])


@pytest.mark.parametrize("name", [POOLED, NSP])
def test_gradients(name: str) -> None:
    bridge, found = tiny("BertForNextSentencePrediction"), []
    hooks = [(name, lambda gradient, hook: found.append(gradient.clone()))]
    run_logits = bridge.run_with_hooks(TOKENS, bwd_hooks=hooks)
    (run_logits[:, 0] - run_logits[:, 1]).sum().backward()
    by_class = torch.tensor([1.0, -1.0]).expand(2, 2)
    head = bridge.original_model.cls.seq_relationship.weight
    right = by_class if name == NSP else by_class @ head
    torch.testing.assert_close(found[0], right.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("cls", "there"),
    [
        ("BertForMaskedLM", {"unembed.hook_out"}),
        ("BertForNextSentencePrediction", {POOLED, NSP}),
        ("BertForPreTraining", {POOLED, NSP, "unembed.hook_out"}),
        ("BertModel", {POOLED}),
    ],
)
def test_each_class_has_the_hook_points_of_its_heads(cls: str, there: set[str]) -> None:
    bridge = tiny(cls)
    for name in (POOLED, NSP, "unembed.hook_out"):
        if name in there:
            assert bridge.hook_dict[name].name == name
        else:
            with pytest.raises(UnknownHookError, match="there is no hook point"):
                bridge.run_with_cache(TOKENS, names_filter=name)


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "BertForNextSentencePrediction", "BertModel"])
@pytest.mark.parametrize("layer", range(4))
def test_runs_can_start_and_stop_at_a_layer(cls: str, layer: int) -> None:
    bridge = tiny(cls)
    names = [f"blocks.{i}.hook_resid_pre" for i in range(3)] + [
        "blocks.2.hook_normalized_resid_post"
    ]
    with torch.no_grad():
        full, cache = bridge.run_with_cache(TOKENS, names_filter=names)
        residual = bridge(TOKENS, stop_at_layer=layer)
        torch.testing.assert_close(residual, cache[names[layer]], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            bridge(residual, start_at_layer=layer), full, atol=1e-5, rtol=1e-5
        )


def test_token_types_reach_the_next_sentence_head() -> None:
    bridge, types = tiny("BertForNextSentencePrediction"), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS, token_type_ids=types)
        table = bridge.original_model.bert.embeddings.token_type_embeddings.weight
        assert torch.equal(cache["embed.hook_token_type_embed"], table[types])
        assert not torch.allclose(logits, bridge(TOKENS))
