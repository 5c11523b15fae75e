"""What a basis makes of a position, or of a row of a batch: the same whatever the others are, or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.views.basis import InBasis, dense
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.rounding import close


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
    there = reconstructed(hook, read).roll(1, 1)
    return read.shape[1] == 1 or close(reconstructed(hook, moved)[:, 1::2], there[:, 1::2])


def by_row(hook: HookPoint, read: Float[Tensor, "batch pos ..."]) -> bool:
    """Whether a basis gives each row of a batch the same whatever the others are: tried with larger ones behind it.

    Args:
        hook: the point in the basis.
        read: what its features are of.
    """
    crowd = torch.cat([read, 3 * read.roll(1, 1)])
    return close(reconstructed(hook, crowd)[: len(read)], reconstructed(hook, read))


def reconstructed(hook: HookPoint, x: Float[Tensor, "batch pos ..."]) -> Tensor:
    """What a basis explains of an activation.

    Args:
        hook: the point in the basis.
        x: what its features are of.
    """
    view = hook.view
    assert isinstance(view, InBasis)
    return view.basis.decode(dense(view.encode(x)))
