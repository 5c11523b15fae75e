"""The mask that a model's eager attention needs, from the one that its loaded implementation was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_torch_flex_attn_available

from bridge.hooks.hook_point import STATE


def additive_mask(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Tensor | None:
    """What is to be added to the scores.

    Args:
        implementation: the attention implementation that the model was loaded with.
        module: the attention module.
        query: ``[batch, head, pos, d_head]``.
        key: ``[batch, head, key_pos, d_head]``.
        mask: what that implementation was given.
        kwargs: what it was given besides (`is_causal`, `sliding_window`).

    Returns:
        A tensor that broadcasts to ``[batch, head, pos, key_pos]``, large and negative where attention is forbidden;
        or None.

    Raises:
        ValueError: the implementation's mask cannot be read.
    """
    if implementation == "eager":
        return mask
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return _as_additive(mask, query)
    if implementation == "sdpa":
        return causal_additive(module, query, key, kwargs) if mask is None else _unreadable(mask)
    if "flash" in implementation:
        allowed = _causal(module, query, key, kwargs, align_end=True)
        if mask is not None:
            padding = mask[:, None, None, :].bool()
            allowed = padding if allowed is None else allowed & padding
        return _as_additive(allowed, query)
    if implementation == "flex_attention" and is_torch_flex_attn_available():
        from torch.nn.attention.flex_attention import BlockMask, create_mask

        if isinstance(mask, BlockMask):
            shape = (query.shape[0], 1, query.shape[2], key.shape[2])
            return _as_additive(create_mask(mask.mask_mod, *shape, device=query.device), query)
        return _as_additive(_causal(module, query, key, kwargs), query)
    raise ValueError(
        f"attention scores and patterns cannot be shown for a model loaded with attn_implementation="
        f'{implementation!r}; load it with "sdpa" or "eager"'
    )


def _unreadable(mask: Any) -> Tensor:
    raise ValueError(
        f"expected an attention mask with four axes, not {type(mask).__name__} {getattr(mask, 'shape', '')}"
    )


def _as_additive(allowed: Tensor | None, query: Tensor) -> Tensor | None:
    if allowed is None or allowed.dtype != torch.bool:
        return allowed
    forbidden = torch.finfo(query.dtype).min
    return torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, forbidden)


def _causal(
    module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any], align_end: bool = False
) -> Tensor | None:
    """Which keys each query may see where only "causal" was said; None: all of them.

    Scaled-dot-product attention aligns the first query with the first key, flash attention the last with the last.
    """
    said = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if said is None else said
    queries, keys = query.shape[2], key.shape[2]
    window = kwargs.get("sliding_window") if align_end else None
    if (queries == 1 and window is None) or not causal:
        return None
    shift = keys - queries if align_end else 0
    rows = torch.arange(queries, device=query.device)[:, None] + shift
    columns = torch.arange(keys, device=query.device)[None, :]
    allowed = columns <= rows
    if window is not None:
        allowed &= columns > rows - window
    return allowed[None, None]


def causal_additive(module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The additive mask of a causal module that scaled-dot-product attention gave none, the same for all layers."""
    said = (kwargs.get("is_causal"), getattr(module, "is_causal", True))
    wanted = (query.shape[2], key.shape[2], query.dtype, query.device, *said)
    if STATE.mask is None or STATE.mask[0] != wanted:
        STATE.mask = (wanted, _as_additive(_causal(module, query, key, kwargs), query))
    return STATE.mask[1]
