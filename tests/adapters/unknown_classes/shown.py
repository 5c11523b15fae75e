"""What a model computes, told by the model itself: the outside that our hook points are compared
with.

Each class in this folder calls `at` where a hook point is to be, with the canonical activation, and
goes on with what that returns: the activation itself, unless a test looks, or edits, there. Nothing
of the library has a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_LOOKING: list[Callable[[str, Tensor], Tensor]] = []


def at(layer: int, name: str, x: Tensor) -> Tensor:
    """An activation of a block, or what a test makes of it."""
    return outside(f"blocks.{layer}.{name}", x) if _LOOKING else x


def outside(name: str, x: Tensor) -> Tensor:
    """An activation outside of blocks, or what a test makes of it."""
    return _LOOKING[-1](name, x) if _LOOKING else x


@contextmanager
def looking(function: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """While a function is given each activation with its name."""
    _LOOKING.append(function)
    try:
        yield
    finally:
        _LOOKING.pop()


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """What a model says of tokens, however it returns that; of one of torch's modules, what is
    computed by hand.
    """
    by_hand = getattr(model, "by_hand", None) if _LOOKING else None
    made = model(tokens) if by_hand is None else by_hand(tokens)
    found = (
        made if isinstance(made, Tensor) else made[0] if isinstance(made, tuple) else made.logits
    )
    assert isinstance(found, Tensor)
    return found


def values(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Every activation, by name."""
    found: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> Tensor:
        assert name not in found, f"{name} is shown twice"
        found[name] = x.detach().clone()
        return x

    with torch.no_grad(), looking(keep):
        logits_of(model, tokens)
    return found


def edited(
    model: nn.Module, tokens: Tensor, edits: Mapping[str, Callable[[Tensor], Tensor]]
) -> Tensor:
    """The logits where activations are edited."""
    with torch.no_grad(), looking(lambda name, x: edits[name](x) if name in edits else x):
        return logits_of(model, tokens)


def gradients(
    model: nn.Module, tokens: Tensor, loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The gradient of a number that is made of the logits, at every activation that has one."""
    live: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        live[name] = x * 1.0 if x.requires_grad else x
        return live[name]

    with torch.enable_grad(), looking(keep):
        total = loss(logits_of(model, tokens))
    wanted = {name: x for name, x in live.items() if x.requires_grad}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
