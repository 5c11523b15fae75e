"""What kernels that are no torch functions mean by their masks, as a mask to be added to the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from transformers.utils.import_utils import is_torch_flex_attn_available

#: Which positions of an axis: as they are indexed with.
Positions = slice | Tensor


def additive_mask(
    kernel: str,
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    mask: Any,
    options: Mapping[str, Any],
    chosen: Positions | None = None,
) -> Tensor | None:
    """Which keys each query may see.

    Args:
        kernel: the attention implementation.
        query, key: what it was given.
        mask: what it was given.
        options: what it was given besides (`is_causal`, `sliding_window`).
        chosen: which queries are asked about; None: all.

    Returns:
        A tensor that broadcasts to ``[batch, head, pos, key_pos]``: true where attention is allowed, or to be added to
        the scores; None: everything is allowed.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return of_queries(mask, chosen)
    if kernel == "flex_attention" and is_torch_flex_attn_available():
        from torch.nn.attention.flex_attention import BlockMask, create_mask

        if isinstance(mask, BlockMask):
            shape = (query.shape[0], 1, query.shape[2], key.shape[2])
            return of_queries(create_mask(mask.mask_mod, *shape, device=query.device), chosen)
        return _causal(query, key, options, chosen, last_aligned=False)
    allowed = _causal(query, key, options, chosen, last_aligned=True)
    if mask is not None:
        padding = mask[:, None, None, :].bool()
        allowed = padding if allowed is None else allowed & padding
    return allowed


def of_queries(x: Tensor, chosen: Positions | None) -> Tensor:
    """The rows of some queries.

    Args:
        x: ``[..., pos, any]``, or with one row for all queries.
        chosen: which queries; None: all.
    """
    return x if chosen is None or x.ndim < 2 or x.shape[-2] == 1 else x[..., chosen, :]


def causal_mask(
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    chosen: Positions | None = None,
    offset: int = 0,
    window: int | None = None,
) -> Shaped[Tensor, "chosen key_pos"]:
    """Each query sees the keys up to its own place.

    Args:
        query, key: as they were given to the kernel.
        chosen: which queries are asked about; None: all.
        offset: at which key the first query is.
        window: how many keys it sees; None: all that come before.
    """
    rows = torch.arange(query.shape[2], device=query.device)[:, None] + offset
    columns = torch.arange(key.shape[2], device=query.device)[None, :]
    rows = rows if chosen is None else rows[chosen]
    allowed = columns <= rows
    return allowed if window is None else allowed & (columns > rows - window)


def _causal(
    query: Tensor, key: Tensor, options: Mapping[str, Any], chosen: Positions | None, last_aligned: bool
) -> Tensor | None:
    """Which keys each query may see where only "causal" was said; None: all of them.

    Flex attention aligns the first query with the first key, flash attention the last with the last.
    """
    queries, keys = query.shape[2], key.shape[2]
    window = options.get("sliding_window") if last_aligned else None
    if (queries == 1 and window is None) or not options.get("is_causal", True):
        return None
    return causal_mask(query, key, chosen, keys - queries if last_aligned else 0, window)[None, None]
