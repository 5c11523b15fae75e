"""What kernels that are no torch functions mean by their masks, as a mask to be added to the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from transformers.utils.import_utils import is_torch_flex_attn_available


def additive_mask(
    kernel: str,
    query: Shaped[Tensor, "batch head pos d_head"],
    key: Shaped[Tensor, "batch kv_head key_pos d_head"],
    mask: Any,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Which keys each query may see.

    Args:
        kernel: the attention implementation.
        query, key: what it was given.
        mask: what it was given.
        options: what it was given besides (`is_causal`, `sliding_window`).

    Returns:
        A tensor that broadcasts to ``[batch, head, pos, key_pos]``: true where attention is allowed, or to be added to
        the scores; None: everything is allowed.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return mask
    if kernel == "flex_attention" and is_torch_flex_attn_available():
        from torch.nn.attention.flex_attention import BlockMask, create_mask

        if isinstance(mask, BlockMask):
            shape = (query.shape[0], 1, query.shape[2], key.shape[2])
            return create_mask(mask.mask_mod, *shape, device=query.device)
        return _causal(query, key, options, last_aligned=False)
    allowed = _causal(query, key, options, last_aligned=True)
    if mask is not None:
        padding = mask[:, None, None, :].bool()
        allowed = padding if allowed is None else allowed & padding
    return allowed


def _causal(query: Tensor, key: Tensor, options: Mapping[str, Any], last_aligned: bool) -> Tensor | None:
    """Which keys each query may see where only "causal" was said; None: all of them.

    Flex attention aligns the first query with the first key, flash attention the last with the last.
    """
    queries, keys = query.shape[2], key.shape[2]
    window = options.get("sliding_window") if last_aligned else None
    if (queries == 1 and window is None) or not options.get("is_causal", True):
        return None
    rows = torch.arange(queries, device=query.device)[:, None] + (keys - queries if last_aligned else 0)
    columns = torch.arange(keys, device=query.device)[None, :]
    allowed = columns <= rows
    if window is not None:
        allowed &= columns > rows - window
    return allowed[None, None]
