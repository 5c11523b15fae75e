"""Modules that run several times in a pass: each call is a block, or a norm, with hook points of
its own.
"""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters import verify
from bridge import TransformerBridge
from bridge.analysis.logit_lens import logit_lens
from bridge.hooks.hooks import HookPoint
from bridge.lens import lens
from tests.tiny_models import tiny_model

TOKENS = torch.tensor([[5, 17, 42, 8, 61, 9, 33], [7, 7, 12, 90, 4, 55, 21]])


def half(x: Tensor, hook: HookPoint) -> Tensor:
    return x * 0.5


@pytest.fixture(scope="module")
def albert() -> TransformerBridge:
    return TransformerBridge(
        tiny_model("albert", "masked", num_hidden_layers=4, num_hidden_groups=2)
    )


def query(bridge: TransformerBridge, group: int) -> nn.Module:
    return bridge.original_model.get_submodule(
        f"albert.encoder.albert_layer_groups.{group}.albert_layers.0.attention.query"
    )


def with_torch(
    bridge: TransformerBridge, group: int, call: int
) -> Float[Tensor, "batch pos vocab"]:
    """Half the queries of one call, by a plain torch hook that counts."""
    calls = [0]

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        calls[0] += 1
        return output * 0.5 if calls[0] == call + 1 else None

    handle = query(bridge, group).register_forward_hook(hook)
    try:
        with torch.no_grad():
            return bridge.original_model(TOKENS).logits
    finally:
        handle.remove()


def test_everything_is_offered_and_proved(albert: TransformerBridge) -> None:
    assert not albert.offered().not_offered
    assert verify(albert).passed


def test_a_cache_keeps_each_call(albert: TransformerBridge) -> None:
    seen: list[Tensor] = []
    handles = [
        query(albert, group).register_forward_hook(lambda module, args, output: seen.append(output))
        for group in (0, 1)
    ]
    with torch.no_grad():
        _, cache = albert.run_with_cache(TOKENS)
    for handle in handles:
        handle.remove()
    for layer in range(4):
        assert torch.equal(cache[f"blocks.{layer}.attn.hook_q"].flatten(2), seen[layer])


@pytest.mark.parametrize("layer", range(4))
def test_a_hook_changes_one_call(albert: TransformerBridge, layer: int) -> None:
    expected = with_torch(albert, *divmod(layer, 2))
    with torch.no_grad():
        scoped = albert.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.{layer}.attn.hook_q", half)])
        albert.add_hook(f"blocks.{layer}.attn.hook_q", half)
        added = albert.original_model(TOKENS).logits  # called directly
    albert.reset_hooks()
    assert torch.equal(scoped, expected)
    assert torch.equal(added, expected)
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for m in albert.original_model.modules()
    )


def test_inside_attention(albert: TransformerBridge) -> None:
    nothing = [
        (f"blocks.2.attn.{hook}", lambda x, hook: torch.zeros_like(x))
        for hook in ("hook_pattern", "hook_z")
    ]
    with torch.no_grad():
        first, second = (albert.run_with_hooks(TOKENS, fwd_hooks=[each]) for each in nothing)
        assert not torch.allclose(first, albert(TOKENS))
    assert torch.allclose(first, second, atol=1e-6)


def test_a_trace_waits_for_a_call(albert: TransformerBridge) -> None:
    with torch.no_grad():
        _, cache = albert.run_with_cache(TOKENS)
        with albert.trace(TOKENS) as run:
            output = albert.blocks[1].output
            q = run["blocks.3.attn.hook_q"]
    assert torch.equal(output, cache["blocks.2.hook_resid_pre"])
    assert torch.equal(q, cache["blocks.3.attn.hook_q"])


@pytest.mark.parametrize("model_type", ["bert", "albert", "rembert"])
def test_lenses_end_in_the_logits(model_type: str) -> None:
    """Also where the embeddings are of another width, and blocks end in a norm on the stream."""
    bridge = TransformerBridge(tiny_model(model_type, "masked"))
    with torch.no_grad():
        logits = bridge.original_model(TOKENS).logits
        assert torch.allclose(logit_lens(bridge, TOKENS)[-1], logits, atol=1e-5)
        assert torch.allclose(lens(bridge, TOKENS).stack()[-1], logits, atol=1e-5)


def test_what_one_module_cannot_do_is_refused(albert: TransformerBridge) -> None:
    with pytest.raises(ValueError, match="its blocks are one module"):
        albert(TOKENS, stop_at_layer=2)
    with pytest.raises(ValueError, match="its blocks are one module"), albert.trace(TOKENS) as run:
        run.skip(0)
    with pytest.raises(ValueError, match="runs several times"):
        albert.program(capture=["blocks.1.attn.hook_q"])


def test_a_norm_that_runs_twice_in_a_block() -> None:
    """X-MOD's block norms the stream behind the MLP, and again behind the adapter, with one
    module.
    """
    bridge = TransformerBridge(tiny_model("xmod", "masked"))
    assert verify(bridge).passed
    norm = bridge.original_model.get_submodule("roberta.encoder.layer.1.output.LayerNorm")
    seen: list[Tensor] = []
    handle = norm.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        names = ["blocks.1.ln2.hook_out", "blocks.1.hook_normalized_resid_post"]
        _, cache = bridge.run_with_cache(TOKENS, names_filter=names)
    handle.remove()
    assert torch.equal(cache["blocks.1.ln2.hook_out"], seen[0])
    assert torch.equal(cache["blocks.1.hook_normalized_resid_post"], seen[1])
