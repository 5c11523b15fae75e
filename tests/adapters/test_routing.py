"""A mixture of experts: its routing can be read, and what is changed takes effect as in
HookedTransformer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bridge import TransformerBridge
from tests.adapters.by_hand.families import by_hand, tiny
from tests.adapters.by_hand.transformer import Run
from tests.conftest import torch_hooks
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(4))


def favour(logits: Tensor) -> Tensor:
    return logits + torch.tensor([0.0, 0.0, 9.0, 0.0], dtype=logits.dtype)


CASES = ("mixtral-gqa", "gpt_oss-gqa", "qwen2_moe-gqa", "qwen3_moe-gqa")
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "hook_router_logits": favour,
    "hook_expert_weights": lambda everyone: everyone.flip(-1),
    "hook_topk_weights": lambda weights: torch.full_like(weights, 0.5),
    "hook_expert_indices": lambda indices: (indices + 1) % 4,
}


@pytest.fixture(params=["eager", "batched_mm", "grouped_mm"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


def mixture(case: str, implementation: str) -> TransformerBridge:
    model = tiny(case)
    model.set_experts_implementation(implementation)
    return TransformerBridge(model)


@pytest.mark.parametrize("hook", CHANGES)
@pytest.mark.parametrize("case", CASES)
def test_a_changed_routing_changes_the_output(case: str, implementation: str, hook: str) -> None:
    bridge = mixture(case, implementation)
    name, change = f"blocks.0.mlp.{hook}", CHANGES[hook]
    with torch.no_grad():
        before = bridge(TOKENS)
        after = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: change(x))])
    right = Run(by_hand(case, bridge.original_model), TOKENS, edits={name: change}).logits
    torch.testing.assert_close(after.double(), right, atol=1e-4, rtol=1e-3)
    assert (after - before).abs().max() > 0.05


@pytest.mark.parametrize("case", CASES[:3])
def test_a_token_can_be_sent_elsewhere_alone(case: str, implementation: str) -> None:
    bridge = mixture(case, implementation)

    def send(indices: Tensor, hook: object) -> Tensor:
        indices[0, 3] = (indices[0, 3] + 1) % 4
        return indices

    points = ["blocks.1.mlp.hook_expert_indices", "blocks.1.hook_mlp_out"]
    with torch.no_grad():
        _, before = bridge.run_with_cache(TOKENS, names_filter=points)
        with bridge.hooks(fwd_hooks=[(points[0], send)]):
            _, after = bridge.run_with_cache(TOKENS, names_filter=points)
    moved = (after[points[1]] - before[points[1]]).abs().amax(-1) > 1e-6
    assert moved.nonzero().tolist() == [[0, 3]]
    assert before[points[0]].shape == (2, 7, 2)


@pytest.mark.parametrize("case", CASES[:3])
def test_each_expert_shows_what_it_computes_of_the_tokens_that_it_was_sent(
    case: str, implementation: str
) -> None:
    """The values, effects and gradients are in by_hand/test_by_hand.py; this is for every
    implementation.
    """
    bridge = mixture(case, implementation)
    names = [
        f"blocks.1.mlp.experts.{e}.hook_{part}"
        for e in range(4)
        for part in ("gate", "pre", "post")
    ]
    chosen = "blocks.1.mlp.hook_expert_indices"
    right = Run(by_hand(case, bridge.original_model), TOKENS).seen
    with torch.no_grad():
        plain = bridge(TOKENS)
        logits, cache = bridge.run_with_cache(TOKENS, names_filter=[*names, chosen])
        assert torch.equal(bridge(TOKENS), plain)
    torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-4)
    for name in names:
        torch.testing.assert_close(
            cache[name].double(), right[name][0].detach(), atol=1e-4, rtol=1e-3
        )
    rows = [len(cache[name]) for name in names[::3]]
    assert (
        rows == [(cache[chosen] == e).sum() for e in range(4)] and sum(rows) == 2 * TOKENS.numel()
    )


@pytest.mark.parametrize("case", CASES[:2])
def test_an_expert_without_tokens_has_no_rows(case: str) -> None:
    bridge = TransformerBridge(tiny(case))
    names = [f"blocks.0.mlp.experts.{e}.hook_post" for e in range(4)]

    def send_all_to_two(indices: Tensor, hook: object) -> Tensor:
        return torch.tensor([1, 3]).expand_as(indices)

    hooks = [("blocks.0.mlp.hook_expert_indices", send_all_to_two)]
    with torch.no_grad(), bridge.hooks(fwd_hooks=hooks):
        _, cache = bridge.run_with_cache(TOKENS, names_filter=names)
    n = TOKENS.numel()
    assert [list(cache[name].shape) for name in names] == [[0, 28], [n, 28], [0, 28], [n, 28]]


def test_only_the_layer_that_is_asked_for_runs_its_experts_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    grouped, ran = ALL_EXPERTS_FUNCTIONS["grouped_mm"], []

    def watched(module: torch.nn.Module, *args: Tensor) -> Tensor:
        ran.append(module)
        return grouped(module, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", watched)
    bridge.original_model.set_experts_implementation("grouped_mm")
    layers = [layer.mlp.experts for layer in bridge.original_model.model.layers]
    with torch.no_grad():
        bridge(TOKENS)
        assert ran == layers
        ran.clear()
        bridge.run_with_cache(TOKENS, names_filter="blocks.0.mlp.experts.2.hook_pre")
        assert ran == layers[1:]
        ran.clear()
        bridge.run_with_cache(TOKENS)  # they have no batch axis, and are there only when named
        assert ran == layers
    assert torch_hooks(bridge.original_model) == 0


def test_experts_behind_someone_elses_forward() -> None:
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    bridge.original_model.set_experts_implementation("grouped_mm")
    experts = bridge.original_model.model.layers[0].mlp.experts
    own, calls, config = experts.forward, [], experts.config
    experts.forward = lambda *args: calls.append(len(args)) or own(*args)
    name = "blocks.0.mlp.experts.1.hook_post"
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, names_filter=name)
    right = Run(by_hand("mixtral-gqa", bridge.original_model), TOKENS).seen[name][0]
    torch.testing.assert_close(cache[name].double(), right.detach(), atol=1e-4, rtol=1e-3)
    assert calls == [3] and experts.config is config and "forward" in experts.__dict__


def test_weights_of_another_type_than_the_logits_are_shown() -> None:
    """Laguna's router makes logits in float32, and weights in the model's bfloat16."""
    model = tiny_model("laguna").to(torch.bfloat16)
    tokens = torch.arange(1, 9)[None]
    plain = model(tokens).logits
    name = next(
        name
        for name in TransformerBridge(model).hook_dict
        if name.endswith("mlp.hook_expert_weights")
    )
    returned: list[torch.Tensor] = []
    router = model.get_submodule(
        name.replace("blocks", "model.layers").replace("hook_expert_weights", "gate")
    )
    handle = router.register_forward_hook(lambda module, args, output: returned.extend(output[1:]))
    try:
        logits, cache = TransformerBridge(model).run_with_cache(tokens, names_filter=name)
    finally:
        handle.remove()
    weights, indices = returned
    assert torch.equal(logits, plain) and weights.dtype == cache[name].dtype == torch.bfloat16
    assert torch.equal(cache[name][0].gather(-1, indices), weights)
    assert torch.equal((cache[name] != 0).sum(-1), torch.full((1, 8), indices.shape[-1]))
