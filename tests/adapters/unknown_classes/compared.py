"""A bridge compared with what its model says of itself: values, effects of edits, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bridge import TransformerBridge
from tests.adapters.unknown_classes import shown
from tests.adapters.unknown_classes.parts import D_VOCAB

TOKENS = torch.randint(0, D_VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


@dataclass
class Compared:
    """What was found.

    Attributes:
        values, effects, gradients: how many points were compared.
        wrong: what differs, and how.
        lacking: what the model shows and the bridge does not offer.
    """

    values: int = 0
    effects: int = 0
    gradients: int = 0
    wrong: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


def _edit(x: Tensor) -> Tensor:
    """Another tensor, the same for the same tensor."""
    noise = torch.linspace(0.3, 1.9, x.numel()).cos().view(x.shape).to(x)
    return torch.where(x < -1e4, x, x * (1 + 0.5 * noise)) if x.is_floating_point() else (x + 1) % 5


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = (
        torch.where(x < -1e4, torch.zeros_like(x), x) if x.is_floating_point() else x
        for x in (a, b)
    )
    return (
        a.shape == b.shape and bool(((a - b).abs() <= 2e-5 * (1 + b.abs().max())).all())
        if a.numel()
        else a.shape == b.shape
    )


def _loss(logits: Tensor) -> Tensor:
    return (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum()


def compare(model: nn.Module, bridge: TransformerBridge) -> Compared:
    """Every point that the model shows and the bridge offers."""
    found = Compared()
    seen = shown.values(model, TOKENS)
    with torch.no_grad():
        plain = shown.logits_of(model, TOKENS)
    offered = [name for name in seen if name in bridge.hook_dict]
    found.lacking = [name for name in seen if name not in offered]
    with torch.no_grad():
        if not torch.equal(bridge(TOKENS), plain):
            found.wrong.append("logits")
        _, cache = bridge.run_with_cache(TOKENS, names_filter=offered)
    for name in offered:
        found.values += 1
        if not _close(cache[name], seen[name]):
            found.wrong.append(f"value of {name}")
    for name in offered:
        found.effects += 1
        hook: Callable[..., Tensor] = lambda x, hook: _edit(x)
        with torch.no_grad():
            made = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, hook)])
        expected = shown.edited(model, TOKENS, {name: _edit})
        if not _close(made, expected):
            found.wrong.append(f"effect of {name}")
        if torch.equal(expected, plain) and ".experts." not in name:
            found.wrong.append(f"no effect of {name}")
    expected = shown.gradients(model, TOKENS, _loss)
    gradients: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: object) -> None:
        gradients[hook.name] = x.detach().clone()  # type: ignore[attr-defined]

    wanted = [name for name in offered if name in expected]
    with torch.enable_grad(), bridge.hooks(bwd_hooks=[(name, keep) for name in wanted]):
        _loss(bridge(TOKENS)).backward()
    bridge.zero_grad()
    for name in wanted:
        found.gradients += 1
        if name not in gradients or not _close(gradients[name], expected[name]):
            found.wrong.append(f"gradient of {name}")
    return found
