"""A mixture of experts: its routing can be read, and what is changed takes effect as in HookedTransformer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from tests.adapters.by_hand.families import by_hand, tiny
from tests.adapters.by_hand.transformer import Run

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(4))


def favour(logits: Tensor) -> Tensor:
    return logits + torch.tensor([0.0, 0.0, 9.0, 0.0], dtype=logits.dtype)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "hook_router_logits": favour,
    "hook_expert_weights": lambda everyone: everyone.flip(-1),
    "hook_topk_weights": lambda weights: torch.full_like(weights, 0.5),
    "hook_expert_indices": lambda indices: (indices + 1) % 4,
}


@pytest.fixture(params=["eager", "batched_mm", "grouped_mm"])
def mixtral(request: pytest.FixtureRequest) -> TransformerBridge:
    model = tiny("mixtral-gqa")
    model.set_experts_implementation(request.param)
    return TransformerBridge(model)


@pytest.mark.parametrize("hook", CHANGES)
def test_a_changed_routing_changes_the_output(mixtral: TransformerBridge, hook: str) -> None:
    name, change = f"blocks.0.mlp.{hook}", CHANGES[hook]
    with torch.no_grad():
        before = mixtral(TOKENS)
        after = mixtral.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: change(x))])
    right = Run(by_hand("mixtral-gqa", mixtral.original_model), TOKENS, edits={name: change}).logits
    torch.testing.assert_close(after.double(), right, atol=1e-4, rtol=1e-3)
    assert (after - before).abs().max() > 0.1


def test_a_token_can_be_sent_elsewhere_alone(mixtral: TransformerBridge) -> None:
    def send(indices: Tensor, hook: object) -> Tensor:
        indices[0, 3] = (indices[0, 3] + 1) % 4
        return indices

    points = ["blocks.1.mlp.hook_expert_indices", "blocks.1.hook_mlp_out"]
    with torch.no_grad():
        _, before = mixtral.run_with_cache(TOKENS, names_filter=points)
        with mixtral.hooks(fwd_hooks=[(points[0], send)]):
            _, after = mixtral.run_with_cache(TOKENS, names_filter=points)
    moved = (after[points[1]] - before[points[1]]).abs().amax(-1) > 1e-6
    assert moved.nonzero().tolist() == [[0, 3]]
    assert before[points[0]].shape == (2, 7, 2)
