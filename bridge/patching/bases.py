"""What a basis makes of a position, or of a row of a batch: the same whatever the others are, or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.views.basis import InBasis, dense
from bridge.bridge import TransformerBridge
from bridge.hooks.hook_point import HookPoint
from bridge.patching.corrupted import close


def read_by(hooks: Sequence[HookPoint]) -> dict[HookPoint, str]:
    """Of the hook points that are in a basis, the names of those that their features are of.

    Args:
        hooks: any hook points.
    """
    found = {}
    for hook in hooks:
        if isinstance(hook.view, InBasis):
            found[hook] = hook.view.reads[0] if hook.view.reads else hook.name.rpartition(".")[0]
    return found


def by_position(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Whether a basis gives each position the same, wherever it is and whatever the others are: tried on an activation.

    Args:
        hook: the point in the basis.
        read: what its features are of.
    """
    moved = read.roll(1, 1)
    moved[:, ::2] = 0
    there = _reconstructed(hook, read).roll(1, 1)
    return read.shape[1] == 1 or close(_reconstructed(hook, moved)[:, 1::2], there[:, 1::2])


def by_row(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Whether a basis gives each row of a batch the same whatever the others are: tried with larger ones behind it.

    Args:
        hook: the point in the basis.
        read: what its features are of.
    """
    crowd = torch.cat([read, 3 * read.roll(1, 1)])
    return close(_reconstructed(hook, crowd)[: len(read)], _reconstructed(hook, read))


def mixing_rows(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    hooks: Sequence[HookPoint],
    attention_mask: Int[Tensor, "batch pos"] | None,
) -> list[str]:
    """The hook points in a basis that makes something else of a row in another batch.

    Args:
        model: the bridge.
        tokens: the prompts that it is tried on.
        hooks: any hook points.
        attention_mask: 1 for tokens and 0 for padding; None: no padding.
    """
    if not (reads := read_by(hooks)):
        return []
    with torch.no_grad():
        _, cache = model.run_with_cache(
            tokens, names_filter=list(dict.fromkeys(reads.values())), attention_mask=attention_mask
        )
        return [hook.name for hook, name in reads.items() if not by_row(hook, cache[name])]


def _reconstructed(hook: HookPoint, x: Tensor) -> Tensor:
    view = hook.view
    assert isinstance(view, InBasis)
    return view.basis.decode(dense(view.encode(x)))
