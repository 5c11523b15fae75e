"""Activation patching, ready made: `get_act_patch_resid_pre` and its siblings.

Example:
    >>> from bridge import TransformerBridge
    >>> from bridge.patching import get_act_patch_attn_head_out_all_pos, get_act_patch_resid_pre
    >>> bridge = TransformerBridge.boot_embedded()
    >>> texts = [f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary")]
    >>> clean, corrupted = bridge.to_tokens(texts)[:, None]
    >>> mary, john = bridge.to_single_token(" Mary"), bridge.to_single_token(" John")
    >>> metric = lambda logits: logits[0, -1, mary] - logits[0, -1, john]
    >>> _, cache = bridge.run_with_cache(clean)
    >>> get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False).shape  # layer pos
    torch.Size([4, 15])
    >>> get_act_patch_attn_head_out_all_pos(bridge, corrupted, cache, metric, verbose=False).shape  # layer head
    torch.Size([4, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.patching.generic import Metric, generic_activation_patch
from bridge.patching.setters import (
    PatchSetter,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
)

_DOC = """Patches {what}, and measures each patch.

Args:
    model: the bridge.
    corrupted_tokens: the corrupted prompts, ``[batch, pos]``, or one of them, ``[pos]``.
    clean_cache: the activations of the clean run, with their batch axis.
    patching_metric: from logits ``[batch, pos, d_vocab]`` to one number.
    options: `index_df`, `return_index_df`, `reduce`, `baseline`, `attention_mask`, `patches_per_run`, `compiled` and
        `verbose` of `generic_activation_patch`.

Returns:
    ``[{axes}]``{note}.

Raises:
    As `generic_activation_patch`.
"""
_GROUPED = "; with grouped keys and values, `head` counts key heads"


def _patcher(name: str, what: str, setter: PatchSetter, *axes: str) -> Callable[..., Any]:
    """A function that patches one kind of activation piece by piece."""

    def patch(
        model: TransformerBridge,
        corrupted_tokens: Int[Tensor, "..."],
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric | Mapping[str, Metric],
        **options: Any,
    ) -> Any:
        if options.get("index_df") is None:
            options.setdefault("index_axis_names", axes)
        return generic_activation_patch(model, corrupted_tokens, clean_cache, patching_metric, setter, name, **options)

    shown = ", ".join(axis.replace("head_index", "head") for axis in axes)
    patch.__doc__ = _DOC.format(what=what, axes=shown, note=_GROUPED if name in ("k", "v") else "")
    return patch


def _head_by_pos(name: str, what: str) -> Callable[..., Any]:
    return _patcher(
        name, f"{what} of each head at each position", layer_pos_head_vector_patch_setter, "layer", "pos", "head"
    )


def _head_all_pos(name: str, what: str) -> Callable[..., Any]:
    return _patcher(name, f"{what} of each head at all positions", layer_head_vector_patch_setter, "layer", "head")


def _stream(name: str, what: str) -> Callable[..., Any]:
    return _patcher(name, f"{what} at each position", layer_pos_patch_setter, "layer", "pos")


get_act_patch_resid_pre = _stream("resid_pre", "the residual stream before each block")
get_act_patch_resid_mid = _stream("resid_mid", "the residual stream between attention and MLP")
get_act_patch_attn_out = _stream("attn_out", "what each layer's attention adds")
get_act_patch_mixer_out = _stream("mixer_out", "what each mixer of a hybrid adds")
get_act_patch_mlp_out = _stream("mlp_out", "what each MLP adds")

get_act_patch_attn_head_out_by_pos = _head_by_pos("z", "the output (z)")
get_act_patch_attn_head_q_by_pos = _head_by_pos("q", "the query")
get_act_patch_attn_head_k_by_pos = _head_by_pos("k", "the key")
get_act_patch_attn_head_v_by_pos = _head_by_pos("v", "the value")
get_act_patch_attn_head_pattern_by_pos = _patcher(
    "pattern",
    "each query's row of each head's attention pattern",
    layer_head_pos_pattern_patch_setter,
    *("layer", "head_index", "dest_pos"),
)
get_act_patch_attn_head_pattern_dest_src_pos = _patcher(
    "pattern",
    "each entry of each head's attention pattern",
    layer_head_dest_src_pos_pattern_patch_setter,
    *("layer", "head_index", "dest_pos", "src_pos"),
)

get_act_patch_attn_head_out_all_pos = _head_all_pos("z", "the output (z)")
get_act_patch_attn_head_q_all_pos = _head_all_pos("q", "the queries")
get_act_patch_attn_head_k_all_pos = _head_all_pos("k", "the keys")
get_act_patch_attn_head_v_all_pos = _head_all_pos("v", "the values")
get_act_patch_attn_head_pattern_all_pos = _patcher(
    "pattern", "each head's attention pattern", layer_head_pattern_patch_setter, "layer", "head_index"
)


def get_act_patch_attn_head_all_pos_every(
    model: TransformerBridge,
    corrupted_tokens: Int[Tensor, "..."],
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "5 layer head"]:
    """Patches each head at all positions: its output, queries, keys, values and pattern.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for `get_act_patch_attn_head_out_all_pos`.

    Returns:
        ``[5, layer, head]``. With grouped keys and values, those two have zeros behind the last key head.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    _numbers_only(metric, options)
    patchers = (
        get_act_patch_attn_head_out_all_pos,
        get_act_patch_attn_head_q_all_pos,
        get_act_patch_attn_head_k_all_pos,
        get_act_patch_attn_head_v_all_pos,
        get_act_patch_attn_head_pattern_all_pos,
    )
    return _stacked(patch(model, corrupted_tokens, clean_cache, metric, **options) for patch in patchers)


def get_act_patch_attn_head_by_pos_every(
    model: TransformerBridge,
    corrupted_tokens: Int[Tensor, "..."],
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "5 layer pos head"]:
    """Patches each head at each position: its output, query, key, value, and its pattern of that query.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for `get_act_patch_attn_head_out_by_pos`.

    Returns:
        ``[5, layer, pos, head]``. With grouped keys and values, those two have zeros behind the last key head.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    _numbers_only(metric, options)
    patchers = (
        get_act_patch_attn_head_out_by_pos,
        get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos,
        get_act_patch_attn_head_v_by_pos,
    )
    results = [patch(model, corrupted_tokens, clean_cache, metric, **options) for patch in patchers]
    pattern = get_act_patch_attn_head_pattern_by_pos(model, corrupted_tokens, clean_cache, metric, **options)
    return _stacked([*results, pattern.transpose(1, 2)])


def get_act_patch_block_every(
    model: TransformerBridge,
    corrupted_tokens: Int[Tensor, "..."],
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "3 layer pos"]:
    """Patches the residual stream before each block, what its attention adds, and what its MLP adds.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for `get_act_patch_resid_pre`.

    Returns:
        ``[3, layer, pos]``.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    _numbers_only(metric, options)
    patchers = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return _stacked(patch(model, corrupted_tokens, clean_cache, metric, **options) for patch in patchers)


def _numbers_only(metric: Any, options: Mapping[str, Any]) -> None:
    """Refuses what gives more than a number for each patch, of which no one tensor can be made."""
    if isinstance(metric, Mapping) or options.get("baseline") or options.get("reduce") == "none":
        raise TypeError(
            "several metrics, baseline=True and reduce='none' are for one kind of activation: call "
            "get_act_patch_attn_head_out_all_pos and its siblings one by one"
        )


def _stacked(results: Any) -> Tensor:
    """Results of all kinds along a first axis; fewer key heads than query heads are filled up with zeros."""
    every: Sequence[Tensor] = list(results)
    heads = max(result.shape[-1] for result in every)
    return torch.stack([torch.nn.functional.pad(result, (0, heads - result.shape[-1])) for result in every])
