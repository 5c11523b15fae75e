"""Families that the reference does not cover, and options of those that it does, against a
computation by hand.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from tests.adapters.by_hand.families import CASES, WORDS, by_hand, tiny
from tests.adapters.by_hand.transformer import Model, Run

TOKENS = torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(2))


@cache
def pair(case: str) -> tuple[TransformerBridge, Model]:
    hf = tiny(case)
    return TransformerBridge(hf), by_hand(case, hf)


@cache
def computed(case: str, fine: bool) -> Run:
    """A run by hand, and the gradients of a number made from its logits."""
    with torch.enable_grad():
        run = Run(pair(case)[1], TOKENS, fine)
        outcome(run.logits).backward()
    return run


def outcome(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 9]).sum()


def half(x: Tensor) -> Tensor:
    return x * 0.5 if x.is_floating_point() else x


def names(case: str) -> dict[str, bool]:
    """The activations that are computed by hand, and whether that takes the fine-grained run."""
    plain = computed(case, False).seen
    return dict.fromkeys(plain, False) | {
        name: True for name in computed(case, True).seen if name not in plain
    }


def agree(ours: Tensor, right: Tensor, atol: float = 1e-4) -> bool:
    return ours.shape == right.shape and torch.allclose(
        ours.to(right.dtype), right, atol=atol, rtol=1e-3
    )


@pytest.mark.parametrize("case", CASES)
def test_every_hook_point_is_computed_by_hand(case: str) -> None:
    points = pair(case)[0].hook_dict.values()
    expected = {
        hook.name
        for hook in points
        if hook.point.group != "extra" and "hook_attn_in" not in hook.name
    }
    assert expected <= set(names(case))
    assert set(names(case)) <= {hook.name for hook in points}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    bridge, _ = pair(case)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS, names_filter=list(names(case)))
    assert agree(logits, computed(case, False).logits)
    wrong = [
        name
        for name, fine in names(case).items()
        if not agree(cache[name], computed(case, fine).seen[name][0])
    ]
    assert not wrong


@pytest.mark.parametrize("case", CASES)
def test_effects_of_halving(case: str) -> None:
    bridge, model = pair(case)
    wrong = []
    with torch.no_grad():
        for name, fine in names(case).items():
            ours = bridge.run_with_hooks(
                TOKENS, fwd_hooks=[(name, lambda x, hook: half(x))]
            ).log_softmax(-1)
            if not agree(
                ours, Run(model, TOKENS, fine, {name: half}).logits.log_softmax(-1), atol=5e-4
            ):
                wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    bridge, _ = pair(case)
    found: dict[str, Tensor] = {}
    wrong = []
    for fine in (False, True):
        hooked = [name for name, needs in names(case).items() if needs == fine]
        # The norm before attention is computed for queries first; its gradient arrives last, and
        # stays.
        keep = [
            (name, lambda gradient, hook: found.__setitem__(hook.name, gradient.clone()))
            for name in hooked
        ]
        outcome(bridge.run_with_hooks(TOKENS, bwd_hooks=keep)).backward()
        for name in hooked:
            right = computed(case, fine).seen[name][0].grad
            if (
                right is None or not right.numel()
            ):  # an expert that no token was sent to is not part of the graph
                continue
            if not agree(found[name], right, atol=2e-4):
                wrong.append(name)
    assert not wrong
