"""Patch setters: each copies one piece of a clean activation into a corrupted one.

`generic_activation_patch` calls them as ``setter(corrupted_activation, index, clean_activation)``; the
index starts with the layer, which has chosen the activation already. They change the corrupted activation in place and
return it. A clean activation of one row serves every row of the corrupted batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Bool, Shaped
from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.hooks import HookPoint

#: ``setter(corrupted_activation, index, clean_activation)`` returns the patched activation, or changes that in place.
PatchSetter = Callable[[Tensor, Sequence[int], Tensor], Tensor | None]

_ALL = slice(None)


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

    @property
    def slot(self) -> int | None:
        """Where an index, the layer first, names a position; None where it names none."""
        return 1 + self.axes.index(self.pos) if self.pos in self.axes else None

    def chosen(self, place: Sequence[int]) -> tuple[int | slice, ...]:
        """What an index, the layer first, picks of the activation without its batch axis."""
        picked = dict(zip(self.axes, place[1:], strict=True))
        return tuple(picked.get(axis, _ALL) for axis in range(max(self.axes) + 1))


_POS, _HEAD, _POS_HEAD = Region((0,), 0, False), Region((1,), 0, False), Region((0, 1), 0, False)
_PATTERN, _QUERY, _ENTRY = (Region(tuple(range(n)), 1, True) for n in (1, 2, 3))


@refuse_wrong_types
def layer_pos_patch_setter(corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor) -> Tensor:
    """Patches one position, for activations that are not patterns.

    Args:
        corrupted_activation: ``[batch, pos, ...]``.
        index: ``[layer, pos]``.
        clean_activation: ``[batch, pos, ...]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_pos_patch_setter
        >>> layer_pos_patch_setter(torch.zeros(1, 3, 2), [0, 1], torch.ones(1, 3, 2))[0].tolist()
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    return _patch(corrupted_activation, index, clean_activation, _POS, "pos")


@refuse_wrong_types
def layer_pos_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patches one head at one position, for q, k, v, z and result.

    Args:
        corrupted_activation: ``[batch, pos, head, d]``.
        index: ``[layer, pos, head]``.
        clean_activation: ``[batch, pos, head, d]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_pos_head_vector_patch_setter
        >>> layer_pos_head_vector_patch_setter(torch.zeros(1, 2, 2, 1), [0, 1, 0], torch.ones(1, 2, 2, 1)).flatten()
        tensor([0., 0., 1., 0.])
    """
    return _patch(corrupted_activation, index, clean_activation, _POS_HEAD, "pos", "head")


@refuse_wrong_types
def layer_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patches one head at all positions, for q, k, v, z and result.

    Args:
        corrupted_activation: ``[batch, pos, head, d]``.
        index: ``[layer, head]``.
        clean_activation: ``[batch, pos, head, d]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_vector_patch_setter
        >>> layer_head_vector_patch_setter(torch.zeros(1, 2, 2, 1), [0, 1], torch.ones(1, 2, 2, 1)).flatten()
        tensor([0., 1., 0., 1.])
    """
    return _patch(corrupted_activation, index, clean_activation, _HEAD, "head")


@refuse_wrong_types
def layer_head_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patches one head's whole pattern, or its scores.

    Args:
        corrupted_activation: ``[batch, head, query, key]``.
        index: ``[layer, head]``.
        clean_activation: ``[batch, head, query, key]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_pattern_patch_setter
        >>> layer_head_pattern_patch_setter(torch.zeros(1, 2, 1, 2), [0, 1], torch.ones(1, 2, 1, 2)).flatten()
        tensor([0., 0., 1., 1.])
    """
    return _patch(corrupted_activation, index, clean_activation, _PATTERN, "head")


@refuse_wrong_types
def layer_head_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patches the row of one head's pattern (or scores) that belongs to one query.

    Args:
        corrupted_activation: ``[batch, head, query, key]``.
        index: ``[layer, head, dest_pos]``; the destination is the query.
        clean_activation: ``[batch, head, query, key]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_pos_pattern_patch_setter
        >>> layer_head_pos_pattern_patch_setter(torch.zeros(1, 1, 2, 2), [0, 0, 1], torch.ones(1, 1, 2, 2)).flatten()
        tensor([0., 0., 1., 1.])
    """
    return _patch(corrupted_activation, index, clean_activation, _QUERY, "head", "dest_pos")


@refuse_wrong_types
def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patches one entry of one head's pattern, or of its scores.

    Args:
        corrupted_activation: ``[batch, head, query, key]``.
        index: ``[layer, head, dest_pos, src_pos]``; the destination is the query, the source the key.
        clean_activation: ``[batch, head, query, key]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_dest_src_pos_pattern_patch_setter as setter
        >>> setter(torch.zeros(1, 1, 2, 2), [0, 0, 1, 0], torch.ones(1, 1, 2, 2)).flatten()
        tensor([0., 0., 1., 0.])
    """
    return _patch(corrupted_activation, index, clean_activation, _ENTRY, "head", "dest_pos", "src_pos")


@refuse_wrong_types
def layer_pos_feature_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patches one feature at one position, for points in a basis.

    Args:
        corrupted_activation: ``[batch, pos, feature]``, or ``[batch, pos, head, feature]``.
        index: ``[layer, pos, feature]``; of features of each head ``[layer, pos, head, feature]``.
        clean_activation: of the same axes.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_pos_feature_patch_setter
        >>> layer_pos_feature_patch_setter(torch.zeros(1, 2, 2), [0, 1, 0], torch.ones(1, 2, 2)).flatten()
        tensor([0., 0., 1., 0.])
    """
    region, heads = _of_features(_POS_HEAD, corrupted_activation.ndim)
    return _patch(corrupted_activation, index, clean_activation, region, "pos", *heads, "feature")


@refuse_wrong_types
def layer_feature_patch_setter(corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor) -> Tensor:
    """Patches one feature at all positions, for points in a basis.

    Args:
        corrupted_activation: ``[batch, pos, feature]``, or ``[batch, pos, head, feature]``.
        index: ``[layer, feature]``; of features of each head ``[layer, head, feature]``.
        clean_activation: of the same axes.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has another length, or the two shapes do not fit.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_feature_patch_setter
        >>> layer_feature_patch_setter(torch.zeros(1, 1, 2, 2), [0, 1, 0], torch.ones(1, 1, 2, 2)).flatten()
        tensor([0., 0., 1., 0.])
    """
    region, heads = _of_features(_HEAD, corrupted_activation.ndim)
    return _patch(corrupted_activation, index, clean_activation, region, *heads, "feature")


def _of_features(region: Region, ndim: int) -> tuple[Region, tuple[str, ...]]:
    """A region of features, which there may be for each head, and what the index names for that."""
    return (region._replace(axes=(*region.axes, 2)), ("head",)) if ndim == 4 else (region, ())


def _patch(corrupted: Tensor, index: Sequence[int], clean: Tensor, region: Region, *names: str) -> Tensor:
    if len(index) != 1 + len(names):
        raise ValueError(f"the index is {list(index)}; this patch setter needs [{', '.join(('layer', *names))}]")
    where = (_ALL, *region.chosen(index))
    # A clean activation without batch axis, or of a longer prompt, could fit by accident: of other axes, other words.
    if corrupted.shape[1:] == clean.shape[1:]:
        try:
            corrupted[where] = clean[where]
        except (IndexError, RuntimeError) as error:
            raise ValueError(_misfit(corrupted, clean, index)) from error
        return corrupted
    raise ValueError(_misfit(corrupted, clean, index))


def _misfit(corrupted: Tensor, clean: Tensor, index: Sequence[int]) -> str:
    return (
        f"cannot patch {list(index)}: the corrupted activation has shape {list(corrupted.shape)}, the clean one "
        f"{list(clean.shape)}. The index has to lie in both, both runs need prompts of the same length, and the clean "
        "cache needs its batch axis (of the same size, or of 1)."
    )


# ----------------------------------------------------------------------------------------------------------------------
# What is known of ready-made patches, and where two activations differ.
# ----------------------------------------------------------------------------------------------------------------------


#: What is known of the setters of `bridge.patching.setters`. A setter of somebody else may do anything.
REGIONS: dict[PatchSetter, Region] = {
    layer_pos_patch_setter: _POS,
    layer_pos_head_vector_patch_setter: _POS_HEAD,
    layer_head_vector_patch_setter: _HEAD,
    layer_pos_feature_patch_setter: _POS_HEAD,
    layer_feature_patch_setter: _HEAD,
    layer_head_pattern_patch_setter: _PATTERN,
    layer_head_pos_pattern_patch_setter: _QUERY,
    layer_head_dest_src_pos_pattern_patch_setter: _ENTRY,
}


def differences(
    clean: Shaped[Tensor, "rows ..."], corrupted: Shaped[Tensor, "batch ..."]
) -> Bool[Tensor, "..."] | None:
    """Where two activations differ in any row, without the batch axis; None where they do not fit.

    Args:
        clean: of the batch, or of one row.
        corrupted: of the batch.

    Example:
        >>> import torch
        >>> from bridge.patching.setters import differences
        >>> differences(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4], [0, 2, 3]]))
        tensor([ True, False,  True])
    """
    if clean.shape[1:] != corrupted.shape[1:] or clean.shape[0] not in (1, len(corrupted)):
        return None
    return (clean.to(corrupted.device) != corrupted).any(0)


# ----------------------------------------------------------------------------------------------------------------------
# The patches of a sweep: where each stands, which piece it is of, and what that was in the clean run.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchStep:
    """One patch.

    Attributes:
        hook: where it stands.
        place: the index, the layer first.
        clean: the activation of the clean run.
        setter: copies the piece.
    """

    hook: HookPoint
    place: list[int]
    clean: Tensor
    setter: PatchSetter

    @property
    def region(self) -> Region | None:
        """What the setter writes of an activation with these axes, where that is known."""
        region, names = REGIONS.get(self.setter), self.hook.point.axes.split()
        if region is None or names[0] != "batch":
            return None
        if self.setter in (layer_feature_patch_setter, layer_pos_feature_patch_setter):
            region, _ = _of_features(region, len(names))
        fits = names[2:] == ["pos", "key_pos"] if region.pattern else names[1] == "pos"
        return region if fits and max(region.axes) < len(names) - 1 else None

    def changed(self, differs: Bool[Tensor, "..."] | None) -> list[int] | None:
        """The positions at which it changes anything; None where that is not known.

        Args:
            differs: where the clean and the corrupted activation differ, without the batch axis; None: not known.
        """
        region = self.region
        if region is None or differs is None:
            return None
        try:
            found = differs[region.chosen(self.place)]
        except (IndexError, ValueError):
            return None  # the setter says what does not fit
        if region.slot is not None:
            return [self.place[region.slot] % differs.shape[region.pos]] if bool(found.any()) else []
        by_position = found.flatten(1).any(1) if found.ndim > 1 else found
        return by_position.nonzero().flatten().tolist()

    def edit(self, start: int) -> Callable[[Tensor], Tensor | None]:
        """What patches the corrupted activation of the positions from `start` on."""
        return lambda activation: self._patched(activation, start)

    def _patched(self, activation: Tensor, start: int) -> Tensor | None:
        region, place, clean = self.region, list(self.place), self.clean
        # Keys and values made from latents are made for all positions, those before `start` too.
        if start and region is not None and activation.shape[1 + region.pos] != clean.shape[1 + region.pos]:
            length = clean.shape[1 + region.pos]
            if region.slot is not None:
                place[region.slot] = place[region.slot] % length - start
            clean = clean.narrow(1 + region.pos, start, length - start)
        return self.setter(activation, place, clean)
