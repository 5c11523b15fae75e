"""Short names of hook points, as HookedTransformer's `get_act_name` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import index
from typing import SupportsIndex

_SHORT = {
    "attn": "pattern", "scores": "attn_scores", "attn_logits": "attn_scores", "query": "q", "key": "k", "value": "v",
    "mlp_pre": "pre", "mlp_mid": "mid", "mlp_post": "post",
}  # fmt: skip
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_IN_ATTENTION = {
    "q", "k", "v", "z", "result", "pattern", "attn_scores", "rot_q", "rot_k",
}  # fmt: skip
_IN_MLP = {"pre", "post", "pre_linear", "mid"}


def act_name(
    name: str, layer: SupportsIndex | str | None = None, layer_type: str | None = None, stack: str = "blocks"
) -> str:
    """The full name of a hook point from its short one, as HookedTransformer's `get_act_name` gives it.

    Args:
        name: a short name such as ``q``, ``resid_pre``, ``scale``; with the layer and the part in it, such as ``q3`` or
            ``scale4ln1``; or already a full one.
        layer: the block, or None outside of the blocks.
        layer_type: the part of the block where the name does not say it: ``a`` or ``attn``, ``m`` or ``mlp``, or a
            norm such as ``ln1``.
        stack: the list of blocks.

    Returns:
        Such as ``blocks.3.attn.hook_q``.

    Example:
        >>> from bridge import act_name
        >>> act_name("q", 3), act_name("normalized", 2, "ln1"), act_name("embed"), act_name("scale4ln1")
        ('blocks.3.attn.hook_q', 'blocks.2.ln1.hook_normalized', 'hook_embed', 'blocks.4.ln1.hook_scale')
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    together = re.fullmatch(r"([a-z_]+)(\d+)(\w*)", name)
    if together and layer is None and layer_type is None:
        name, layer, layer_type = together.groups()
    name = _SHORT.get(name, name)
    part = _PARTS.get(layer_type or "", layer_type or "")
    stem = name.partition(".")[0]  # behind the dot, a basis
    if not part and stem in _IN_ATTENTION:
        part = "attn"
    if not part and stem in _IN_MLP:
        part = "mlp"
    if name in ("scale", "normalized") and not part and layer is None:
        part = "ln_final"
    pieces = [] if layer is None else [stack, layer if isinstance(layer, str) else str(index(layer))]
    if part:
        pieces.append(part)
    return ".".join([*pieces, f"hook_{name}"])


def last_stream(hook_dict: Mapping[str, object], n_layers: int) -> str:
    """The name of what leaves the last block: of blocks that end in a norm on the stream (BERT), what that makes.

    Args:
        hook_dict: a bridge's hook points, by name.
        n_layers: how many blocks it has.
    """
    normed = f"blocks.{n_layers - 1}.hook_normalized_resid_post"
    return normed if normed in hook_dict else f"blocks.{n_layers - 1}.hook_resid_post"
