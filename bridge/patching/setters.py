"""Patch setters: each copies one piece of a clean activation into a corrupted one.

`generic_activation_patch` calls a setter as ``setter(corrupted_activation, index,
clean_activation)``. The index starts with the layer, which has already selected the activation.
Setters change the corrupted activation in place and return it. A clean activation with one row is
used for every row of the corrupted batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Bool, Shaped
from torch import Tensor

from bridge.arguments import refuse_wrong_types
from bridge.hooks.hooks import HookPoint

#: ``setter(corrupted_activation, index, clean_activation)`` returns the patched activation, or
#: changes that in place.
PatchSetter = Callable[[Tensor, Sequence[int], Tensor], Tensor | None]

_ALL = slice(None)


class _Region(NamedTuple):
    """The part of an activation that a setter writes.

    Attributes:
        axes: the axes of the activation, without its batch axis, that the index after the layer
            selects from.
        pos: the one of these axes that counts positions (queries, for a pattern).
        pattern: whether axes are ``[batch, head, query, key]``, and not ``[batch, pos, ...]``.
    """

    axes: tuple[int, ...]
    pos: int
    pattern: bool

    @property
    def slot(self) -> int | None:
        """Return the place in an index that names a position (0 is the layer), or None."""
        return 1 + self.axes.index(self.pos) if self.pos in self.axes else None

    def chosen(self, place: Sequence[int]) -> tuple[int | slice, ...]:
        """Return the slices of the activation, without its batch axis, that an index selects."""
        picked = dict(zip(self.axes, place[1:], strict=True))
        return tuple(picked.get(axis, _ALL) for axis in range(max(self.axes) + 1))


_POS, _HEAD, _POS_HEAD = _Region((0,), 0, False), _Region((1,), 0, False), _Region((0, 1), 0, False)
_PATTERN, _QUERY, _ENTRY = (_Region(tuple(range(n)), 1, True) for n in (1, 2, 3))


@refuse_wrong_types
def layer_pos_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one position, for activations that are not patterns.

    Args:
        corrupted_activation: ``[batch, pos, ...]``.
        index: ``[layer, pos]``.
        clean_activation: ``[batch, pos, ...]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

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
    """Patch one head at one position, for q, k, v, z and result.

    Args:
        corrupted_activation: ``[batch, pos, head, d]``.
        index: ``[layer, pos, head]``.
        clean_activation: ``[batch, pos, head, d]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_pos_head_vector_patch_setter
        >>> layer_pos_head_vector_patch_setter(
        ...     torch.zeros(1, 2, 2, 1), [0, 1, 0], torch.ones(1, 2, 2, 1)
        ... ).flatten()
        tensor([0., 0., 1., 0.])
    """
    return _patch(corrupted_activation, index, clean_activation, _POS_HEAD, "pos", "head")


@refuse_wrong_types
def layer_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one head at all positions, for q, k, v, z and result.

    Args:
        corrupted_activation: ``[batch, pos, head, d]``.
        index: ``[layer, head]``.
        clean_activation: ``[batch, pos, head, d]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_vector_patch_setter
        >>> layer_head_vector_patch_setter(
        ...     torch.zeros(1, 2, 2, 1), [0, 1], torch.ones(1, 2, 2, 1)
        ... ).flatten()
        tensor([0., 1., 0., 1.])
    """
    return _patch(corrupted_activation, index, clean_activation, _HEAD, "head")


@refuse_wrong_types
def layer_head_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one head's entire pattern, or its scores.

    Args:
        corrupted_activation: ``[batch, head, query, key]``.
        index: ``[layer, head]``.
        clean_activation: ``[batch, head, query, key]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_pattern_patch_setter
        >>> layer_head_pattern_patch_setter(
        ...     torch.zeros(1, 2, 1, 2), [0, 1], torch.ones(1, 2, 1, 2)
        ... ).flatten()
        tensor([0., 0., 1., 1.])
    """
    return _patch(corrupted_activation, index, clean_activation, _PATTERN, "head")


@refuse_wrong_types
def layer_head_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch the row of one query in one head's pattern (or scores).

    Args:
        corrupted_activation: ``[batch, head, query, key]``.
        index: ``[layer, head, dest_pos]``; the destination is the query.
        clean_activation: ``[batch, head, query, key]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_pos_pattern_patch_setter
        >>> layer_head_pos_pattern_patch_setter(
        ...     torch.zeros(1, 1, 2, 2), [0, 0, 1], torch.ones(1, 1, 2, 2)
        ... ).flatten()
        tensor([0., 0., 1., 1.])
    """
    return _patch(corrupted_activation, index, clean_activation, _QUERY, "head", "dest_pos")


@refuse_wrong_types
def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one entry of one head's pattern, or of its scores.

    Args:
        corrupted_activation: ``[batch, head, query, key]``.
        index: ``[layer, head, dest_pos, src_pos]``; the destination is the query, the source the
            key.
        clean_activation: ``[batch, head, query, key]``.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_head_dest_src_pos_pattern_patch_setter as setter
        >>> setter(torch.zeros(1, 1, 2, 2), [0, 0, 1, 0], torch.ones(1, 1, 2, 2)).flatten()
        tensor([0., 0., 1., 0.])
    """
    return _patch(
        corrupted_activation, index, clean_activation, _ENTRY, "head", "dest_pos", "src_pos"
    )


@refuse_wrong_types
def layer_pos_feature_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one feature at one position, for points in a basis.

    Args:
        corrupted_activation: ``[batch, pos, feature]``, or ``[batch, pos, head, feature]``.
        index: ``[layer, pos, feature]``; with features per head ``[layer, pos, head, feature]``.
        clean_activation: an activation with the same axes.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_pos_feature_patch_setter
        >>> layer_pos_feature_patch_setter(
        ...     torch.zeros(1, 2, 2), [0, 1, 0], torch.ones(1, 2, 2)
        ... ).flatten()
        tensor([0., 0., 1., 0.])
    """
    region, heads = _feature_region(_POS_HEAD, corrupted_activation.ndim)
    return _patch(corrupted_activation, index, clean_activation, region, "pos", *heads, "feature")


@refuse_wrong_types
def layer_feature_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one feature at all positions, for points in a basis.

    Args:
        corrupted_activation: ``[batch, pos, feature]``, or ``[batch, pos, head, feature]``.
        index: ``[layer, feature]``; with features per head ``[layer, head, feature]``.
        clean_activation: an activation with the same axes.

    Returns:
        The corrupted activation, changed.

    Raises:
        ValueError: the index has the wrong length, or the two shapes do not match.

    Example:
        >>> import torch
        >>> from bridge.patching import layer_feature_patch_setter
        >>> layer_feature_patch_setter(
        ...     torch.zeros(1, 1, 2, 2), [0, 1, 0], torch.ones(1, 1, 2, 2)
        ... ).flatten()
        tensor([0., 0., 1., 0.])
    """
    region, heads = _feature_region(_HEAD, corrupted_activation.ndim)
    return _patch(corrupted_activation, index, clean_activation, region, *heads, "feature")


def _feature_region(region: _Region, ndim: int) -> tuple[_Region, tuple[str, ...]]:
    """Return a region of features, which may be per head, and the index axes that it needs."""
    return (region._replace(axes=(*region.axes, 2)), ("head",)) if ndim == 4 else (region, ())


def _patch(
    corrupted: Tensor, index: Sequence[int], clean: Tensor, region: _Region, *names: str
) -> Tensor:
    if len(index) != 1 + len(names):
        raise ValueError(
            f"the index is {list(index)}; this patch setter needs [{', '.join(('layer', *names))}]"
        )
    entries = (_ALL, *region.chosen(index))
    try:
        # A clean activation without a batch axis, or of a longer prompt, could have a matching
        # shape by accident.
        if corrupted.shape[1:] != clean.shape[1:]:
            raise IndexError("the shapes differ")
        corrupted[entries] = clean[entries]
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"cannot patch {list(index)}: the corrupted activation has shape"
            f" {list(corrupted.shape)}, the clean one {list(clean.shape)}. The index has to lie in"
            " both, both runs need prompts of the same length, and the clean cache needs its batch"
            " axis (of the same size, or of 1)."
        ) from error
    return corrupted


# --------------------------------------------------------------------------------------------------
# Known regions of the ready-made setters, and the comparison of two activations.
# --------------------------------------------------------------------------------------------------


#: The regions that the setters of `bridge.patching.setters` write. A user's own setter may write
#: anywhere.
REGIONS: dict[PatchSetter, _Region] = {
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
    """Return where two activations differ in any row, without the batch axis; None if their shapes
    do not fit.

    Args:
        clean: the activation of the batch, or of one row.
        corrupted: the activation of the batch.

    Example:
        >>> import torch
        >>> from bridge.patching.setters import differences
        >>> differences(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4], [0, 2, 3]]))
        tensor([ True, False,  True])
    """
    if clean.shape[1:] != corrupted.shape[1:] or clean.shape[0] not in (1, len(corrupted)):
        return None
    return (clean.to(corrupted.device) != corrupted).any(0)


# --------------------------------------------------------------------------------------------------
# The patches of a sweep: the hook point, the index, and the clean activation of each.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchStep:
    """A patch of a sweep.

    Attributes:
        hook: the patched hook point.
        place: the index, starting with the layer.
        clean: the activation of the clean run.
        setter: the function that copies the piece.
    """

    hook: HookPoint
    place: list[int]
    clean: Tensor
    setter: PatchSetter

    @property
    def region(self) -> _Region | None:
        """Return the region of such an activation that the setter writes; None if unknown."""
        region, axes = REGIONS.get(self.setter), self.hook.point.axes.split()
        if region is None or axes[0] != "batch":
            return None
        if self.setter in (layer_feature_patch_setter, layer_pos_feature_patch_setter):
            region, _ = _feature_region(region, len(axes))
        fits = axes[2:] == ["pos", "key_pos"] if region.pattern else axes[1] == "pos"
        return region if fits and max(region.axes) < len(axes) - 1 else None

    def changed(self, differs: Bool[Tensor, "..."] | None) -> list[int] | None:
        """Return the positions that the patch changes; None if they are not known.

        Args:
            differs: where the clean and the corrupted activation differ, without the batch axis;
                None: unknown.
        """
        region = self.region
        if region is None or differs is None:
            return None
        try:
            entries = differs[region.chosen(self.place)]
        except (IndexError, ValueError):
            return None  # the setter raises the error about the shapes
        if region.slot is None:
            by_position = entries.flatten(1).any(1) if entries.ndim > 1 else entries
            return by_position.nonzero().flatten().tolist()
        position = self.place[region.slot] % differs.shape[region.pos]
        return [position] if bool(entries.any()) else []

    def edit(self, start: int) -> Callable[[Tensor], Tensor | None]:
        """Return the function that patches the corrupted activation from position `start` on."""
        return lambda activation: self._patched(activation, start)

    def _patched(self, activation: Tensor, start: int) -> Tensor | None:
        region, place, clean = self.region, list(self.place), self.clean
        if start and region is not None:
            axis = 1 + region.pos
            length = clean.shape[axis]
            # Keys and values computed from latents exist for all positions, including those before
            # `start`.
            if activation.shape[axis] != length:
                if region.slot is not None:
                    place[region.slot] = place[region.slot] % length - start
                clean = clean.narrow(axis, start, length - start)
        return self.setter(activation, place, clean)
