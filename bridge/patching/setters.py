"""Patch setters: each copies one piece of a clean activation into a corrupted one.

`generic_activation_patch` calls them as ``setter(corrupted_activation, index, clean_activation)``; the
index starts with the layer, which has chosen the activation already. They change the corrupted activation in place and
return it. A clean activation of one row serves every row of the corrupted batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types

#: ``setter(corrupted_activation, index, clean_activation)`` returns the patched activation, or changes that in place.
PatchSetter = Callable[[Tensor, Sequence[int], Tensor], Tensor | None]

_ALL = slice(None)


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
    _, pos = _named(index, "layer", "pos")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, pos))


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
    _, pos, head = _named(index, "layer", "pos", "head")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, pos, head))


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
    _, head = _named(index, "layer", "head")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, _ALL, head))


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
    _, head = _named(index, "layer", "head")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, head))


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
    _, head, dest = _named(index, "layer", "head", "dest_pos")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, head, dest))


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
    _, head, dest, src = _named(index, "layer", "head", "dest_pos", "src_pos")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, head, dest, src))


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
    _, *place = _named(index, "layer", "pos", *_heads_of(corrupted_activation), "feature")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, *place))


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
    _, *place = _named(index, "layer", *_heads_of(corrupted_activation), "feature")
    return _patch(corrupted_activation, clean_activation, index, (_ALL, _ALL, *place))


def _heads_of(features: Tensor) -> list[str]:
    return ["head"] if features.ndim == 4 else []


def _named(index: Sequence[int], *axes: str) -> Sequence[int]:
    if len(index) != len(axes):
        raise ValueError(f"the index is {list(index)}; this patch setter needs [{', '.join(axes)}]")
    return index


def _patch(corrupted: Tensor, clean: Tensor, index: Sequence[int], where: tuple[Any, ...]) -> Tensor:
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
