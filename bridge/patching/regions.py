"""Which positions a ready-made patch changes, and the same patch of a run that starts at a later position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Bool, Shaped
from torch import Tensor

from bridge.patching.setters import (
    PatchSetter,
    layer_feature_patch_setter,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_feature_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
)


class Region(NamedTuple):
    """What a setter writes.

    Attributes:
        axes: which axes of the activation, without its batch axis, the index after the layer picks from.
        pos: which of these axes counts positions (queries, of a pattern).
        pattern: whether it is for ``[batch, head, query, key]``, or for ``[batch, pos, ...]``.
    """

    axes: tuple[int, ...]
    pos: int
    pattern: bool


#: What is known of the setters of `bridge.patching.setters`. A setter of somebody else may do anything.
REGIONS: dict[PatchSetter, Region] = {
    layer_pos_patch_setter: Region((0,), 0, False),
    layer_pos_head_vector_patch_setter: Region((0, 1), 0, False),
    layer_head_vector_patch_setter: Region((1,), 0, False),
    layer_pos_feature_patch_setter: Region((0, 1), 0, False),
    layer_feature_patch_setter: Region((1,), 0, False),
    layer_head_pattern_patch_setter: Region((0,), 1, True),
    layer_head_pos_pattern_patch_setter: Region((0, 1), 1, True),
    layer_head_dest_src_pos_pattern_patch_setter: Region((0, 1, 2), 1, True),
}


def region_of(setter: PatchSetter, axes: str) -> Region | None:
    """What a setter writes of an activation with these axes; None where that is not known.

    Args:
        setter: the setter.
        axes: of the activation, such as ``"batch pos d_model"``.

    Example:
        >>> from bridge.patching import layer_pos_patch_setter
        >>> from bridge.patching.regions import region_of
        >>> region_of(layer_pos_patch_setter, "batch pos d_model")
        Region(axes=(0,), pos=0, pattern=False)
    """
    region = REGIONS.get(setter)
    names = axes.split()
    if region is None or names[0] != "batch":
        return None
    if setter in (layer_feature_patch_setter, layer_pos_feature_patch_setter) and len(names) == 4:
        region = region._replace(axes=(*region.axes, 2))  # features of each head
    fits = names[2:] == ["pos", "key_pos"] if region.pattern else names[1] == "pos"
    return region if fits and max(region.axes) < len(names) - 1 else None


def differences(
    clean: Shaped[Tensor, "rows ..."], corrupted: Shaped[Tensor, "batch ..."]
) -> Bool[Tensor, "..."] | None:
    """Where two activations differ in any row, without the batch axis; None where they do not fit.

    Args:
        clean: of the batch, or of one row.
        corrupted: of the batch.

    Example:
        >>> import torch
        >>> from bridge.patching.regions import differences
        >>> differences(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4], [0, 2, 3]]))
        tensor([ True, False,  True])
    """
    if clean.shape[1:] != corrupted.shape[1:] or clean.shape[0] not in (1, len(corrupted)):
        return None
    return (clean.to(corrupted.device) != corrupted).any(0)


def changed_positions(region: Region, place: Sequence[int], differs: Bool[Tensor, "..."]) -> list[int]:
    """The positions at which a patch changes anything.

    Args:
        region: what the setter writes.
        place: the index, the layer first.
        differs: see `differences`.

    Raises:
        IndexError: the place is not in the activation.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_vector_patch_setter
        >>> from bridge.patching.regions import changed_positions, region_of
        >>> differs = torch.tensor([[False, False], [False, True], [True, True]])[..., None]  # pos head d_head
        >>> region = region_of(layer_head_vector_patch_setter, "batch pos n_heads d_head")
        >>> changed_positions(region, [0, 1], differs), changed_positions(region, [0, 0], differs)
        ([1, 2], [2])
    """
    index: list[int | slice] = [slice(None)] * differs.ndim
    for axis, at in zip(region.axes, place[1:], strict=True):
        index[axis] = at
    found = differs[tuple(index)]
    if region.pos in region.axes:
        at = place[1 + region.axes.index(region.pos)]
        return [at % differs.shape[region.pos]] if bool(found.any()) else []
    by_position = found.flatten(1).any(1) if found.ndim > 1 else found
    return by_position.nonzero().flatten().tolist()


def from_position(
    region: Region, place: Sequence[int], clean: Shaped[Tensor, "..."], start: int
) -> tuple[list[int], Shaped[Tensor, "..."]]:
    """The index and the clean activation of the same patch where the positions before `start` do not run.

    Args:
        region: what the setter writes.
        place: the index, the layer first.
        clean: the clean activation.
        start: the first position that runs.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_pos_patch_setter
        >>> from bridge.patching.regions import from_position, region_of
        >>> region = region_of(layer_pos_patch_setter, "batch pos d_model")
        >>> place, clean = from_position(region, [3, 5], torch.zeros(1, 8, 2), 4)
        >>> place, clean.shape
        ([3, 1], torch.Size([1, 4, 2]))
    """
    length = clean.shape[1 + region.pos]
    moved = list(place)
    if region.pos in region.axes:
        slot = 1 + region.axes.index(region.pos)
        moved[slot] = moved[slot] % length - start
    return moved, clean.narrow(1 + region.pos, start, length - start)
