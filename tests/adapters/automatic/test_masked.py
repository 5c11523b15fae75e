"""Masked language models of unusual build: what is inferred for them is proved, and what is wrong
of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from adapters import Architecture, Attention, verify
from adapters.proofs.scores import SCORES, VALUES
from adapters.proofs.slopes import SLOPES
from adapters.proofs.stream import ENDS
from bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from tests.adapters.mutations import declared_as
from tests.tiny_models import tiny_model

TOKENS = torch.tensor([[5, 17, 42, 8, 61, 9, 33], [7, 7, 12, 90, 4, 55, 21]])

#: What each is built of that others are not.
BUILDS = {
    "deberta": "scores that queries and keys alone add to, biases beside a fused projection",
    "deberta-v2": "the same with projections that run twice",
    "flaubert": "blocks that are no modules",
    "fnet": "a mixer without parameters, a projection behind the embeddings",
    "layoutlm": "embeddings that run twice",
    "mpnet": "a table of position biases outside of the blocks",
    "nystromformer": "a convolution of the values beside attention",
    "roc_bert": "a projection of several embeddings before their sum",
    "ultrabert": (
        "a head without a norm around the output layer, windows wider than the configuration says"
    ),
    "yoso": "a mixer with its layers inside of modules",
}


#: YOSO's code has a backward of its own for its hashing attention, which is not the slope, nor
#: before it.
NOT_PROVED = {
    "yoso": {
        "embed.ln.hook_scale",
        *(f"blocks.{layer}.mixer.hook_{made}" for layer in (0, 1) for made in ("query", "key")),
    }
}


@pytest.mark.parametrize("model_type", BUILDS)
def test_all_is_offered_and_proved(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type, "masked"))
    assert set(bridge.offered().not_offered) == NOT_PROVED.get(model_type, set())
    assert all(SLOPES in why for why in bridge.offered().not_offered.values())
    report = verify(bridge)
    assert report.passed, report
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    assert all(cache[name].numel() for name in cache)  # also what the model writes over afterwards


def changed(declared: Architecture, change: Callable[[Attention], Attention]) -> Architecture:
    """A declaration of one stack with other attentions."""
    block = declared.stack.block
    steps = tuple(
        replace(step, part=change(step.part)) if isinstance(step.part, Attention) else step
        for step in block.steps
    )
    return replace(declared, stacks=(replace(declared.stack, block=replace(block, steps=steps)),))


WRONG: dict[str, tuple[str, Callable[[Attention], Attention], str]] = {
    "no bias of queries": (
        "deberta",
        lambda part: replace(part, q=replace(part.q, bias=None)),
        SCORES,
    ),
    "no bias of values": (
        "deberta",
        lambda part: replace(part, v=replace(part.v, bias=None)),
        VALUES,
    ),
    "nothing is added": ("deberta", lambda part: replace(part, score_bias_modules=None), SCORES),
    "something is added": ("bert", lambda part: replace(part, score_bias_modules=()), SCORES),
    "another scale": (
        "deberta-v2",
        lambda part: replace(part, config_values={"attn_scale": 2.0}),
        SCORES,
    ),
    "no convolution": ("nystromformer", lambda part: replace(part, z_transform=None), VALUES),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_attentions_are_refused(case: str) -> None:
    model_type, change, claim = WRONG[case]
    model = tiny_model(model_type, "masked")
    declared = TransformerBridge(model).architecture
    with declared_as(changed(declared, change)):
        report = verify(TransformerBridge(model, automatic=False))
    assert claim in {check.name for check in report.checks if not check.passed}, report


def test_a_projection_left_out_is_refused() -> None:
    model = tiny_model("roc_bert", "masked")
    declared = TransformerBridge(model).architecture
    stack = declared.stack
    wrong = replace(
        declared, stacks=(replace(stack, embedding=replace(stack.embedding, project=None)),)
    )
    with declared_as(wrong):
        report = verify(TransformerBridge(model, automatic=False))
    assert ENDS in {check.name for check in report.checks if not check.passed}, report


def test_patterns_of_deberta_are_those_of_hugging_face() -> None:
    bridge = TransformerBridge(tiny_model("deberta-v2", "masked"))
    with torch.no_grad():
        expected = bridge.original_model(TOKENS, output_attentions=True).attentions
        _, cache = bridge.run_with_cache(TOKENS)
    for layer in range(bridge.cfg.n_layers):
        torch.testing.assert_close(cache["pattern", layer], expected[layer])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pos_att_type": ["p2c"]},
        {"relative_attention": False},
        {"share_att_key": True, "norm_rel_ebd": "layer_norm"},
    ],
)
@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2"])
def test_queries_and_keys_of_deberta_are_what_their_weights_say(
    model_type: str, more: dict[str, object]
) -> None:
    """By its own layers, taken apart by hand; some of these run once more, for the relative
    places.
    """
    bridge = TransformerBridge(tiny_model(model_type, "masked", **more))
    mask = torch.ones_like(TOKENS)
    mask[1, -3:] = 0
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, attention_mask=mask)
    for i, layer in enumerate(bridge.original_model.deberta.encoder.layer):
        attn, read, heads = layer.attention.self, cache["resid_pre", i], bridge.cfg.n_heads
        if model_type == "deberta":
            both = torch.einsum(
                "bpm,htdm->tbphd", read, attn.in_proj.weight.view(heads, 3, -1, read.shape[-1])
            )
            query, key = both[0] + attn.q_bias.view(heads, -1), both[1]
        else:
            query, key = (
                made(read).unflatten(-1, (heads, -1)) for made in (attn.query_proj, attn.key_proj)
            )
        for letter, right in (("q", query), ("k", key)):
            W, b = (getattr(bridge.blocks[i].attn, f"{name}_{letter.upper()}") for name in "Wb")
            torch.testing.assert_close(cache[letter, i], right)
            torch.testing.assert_close(torch.einsum("bpm,hmd->bphd", read, W) + b, right)


def test_the_stream_between_blocks_that_are_no_modules() -> None:
    """Where no module stands around a block, an edit of the stream reaches the sum, too."""
    bridge = TransformerBridge(tiny_model("xlm", "masked"))
    model = bridge.original_model

    def half(x: Tensor, hook: HookPoint) -> Tensor:
        return x * 0.5

    def by_hand(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * 0.5

    handle = model.get_submodule("transformer.layer_norm2.0").register_forward_hook(by_hand)
    with torch.no_grad():
        expected = model(TOKENS).logits
        handle.remove()
        before = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", half)])
        after = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.0.hook_normalized_resid_post", half)]
        )
        streams = model(TOKENS, output_hidden_states=True).hidden_states
        _, cache = bridge.run_with_cache(TOKENS)
    assert torch.equal(before, expected) and torch.equal(after, expected)
    assert all(torch.equal(cache["resid_pre", layer], streams[layer]) for layer in range(2))
    with pytest.raises(ValueError, match="its blocks are not modules"):
        bridge(TOKENS, stop_at_layer=1)
