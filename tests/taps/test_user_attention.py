"""Attention functions and kernels of the user's own work on under hooks, caches and programs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(3))
PATTERN = "blocks.1.attn.hook_pattern"


def sharp(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Attention with twice the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = 2 * scaling * query @ key.transpose(-1, -2) + attention_mask[..., : key.shape[2]]
    pattern = torch.softmax(scores, -1)
    return (pattern @ value).transpose(1, 2).contiguous(), pattern


def by_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **more: Any,
) -> tuple[Tensor, None]:
    """The same through torch's kernel."""
    made = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=2 * scaling, enable_gqa=True
    )
    return made.transpose(1, 2).contiguous(), None


@pytest.fixture(params=[sharp, by_kernel])
def bridge(request: pytest.FixtureRequest) -> Iterator[TransformerBridge]:
    AttentionInterface.register("sharp", request.param)
    AttentionMaskInterface.register("sharp", eager_mask)
    model = tiny("llama-gqa")
    model.set_attn_implementation("sharp")
    yield TransformerBridge(model)
    assert ALL_ATTENTION_FUNCTIONS["sharp"] is request.param  # still there
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["sharp"]


def expected(model: Any) -> Tensor:
    """The second layer's pattern, by hand."""
    kept: list[Tensor] = []

    def noting(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        made = sharp(*args, **kwargs)
        kept.append(made[1])
        return made

    own = ALL_ATTENTION_FUNCTIONS["sharp"]
    AttentionInterface.register("sharp", noting)
    model(TOKENS)
    AttentionInterface.register("sharp", own)
    return kept[1]


def test_it_runs_and_is_seen_and_changed(bridge: TransformerBridge):
    model = bridge.original_model
    plain = model(TOKENS).logits
    assert not torch.allclose(plain, tiny("llama-gqa")(TOKENS).logits)  # it is not sdpa
    logits, cache = bridge.run_with_cache(
        TOKENS, names_filter=[PATTERN, "blocks.1.attn.hook_rot_k"]
    )
    assert torch.equal(logits, plain)
    torch.testing.assert_close(cache[PATTERN], expected(model))

    def look_back(pattern: Tensor, hook: object) -> Tensor:
        return torch.eye(7).expand_as(pattern)

    edited = bridge.run_with_hooks(TOKENS, fwd_hooks=[(PATTERN, look_back)])
    value = bridge.run_with_hooks(  # each position gets its own value
        TOKENS,
        fwd_hooks=(
            [("blocks.1.attn.hook_z", lambda z, hook: v.repeat_interleave(2, 2))]
            if (v := bridge.run_with_cache(TOKENS)[1]["blocks.1.attn.hook_v"]) is not None
            else []
        ),
    )
    torch.testing.assert_close(edited, value)
    program = bridge.program(capture=[PATTERN], interventions=[(PATTERN, look_back)])
    torch.testing.assert_close(program(TOKENS)["logits"], edited)
    torch.testing.assert_close(bridge.program(capture=[PATTERN])(TOKENS)[PATTERN], cache[PATTERN])


def test_a_kernel_that_stands_for_a_forward():
    """What `kernels.kernelize` leaves on a module (`use_kernels=True`): a method of its own."""
    model = tiny("llama-gqa")
    calls: list[str] = []

    def kernel(self: Any, hidden_states: Tensor) -> Tensor:
        calls.append(type(self).__name__)
        return type(self).forward(self, hidden_states) * 1.5

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(kernel, module)
    bridge = TransformerBridge(model)
    plain = model(TOKENS).logits
    calls.clear()
    logits, cache = bridge.run_with_cache(TOKENS, names_filter=["blocks.1.ln1.hook_out", PATTERN])
    assert torch.equal(logits, plain) and calls == ["LlamaRMSNorm"] * 5
    calls.clear()
    hooks = [("blocks.1.ln1.hook_out", lambda act, hook: act * 0.5)]
    wanted = bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
    made = bridge.program(capture=["blocks.1.ln1.hook_out"], interventions=hooks)(TOKENS)
    assert torch.equal(made["logits"], wanted)
    assert torch.equal(made["blocks.1.ln1.hook_out"], cache["blocks.1.ln1.hook_out"] * 0.5)
    assert calls == ["LlamaRMSNorm"] * 10
