"""Readings of the residual stream as next tokens: the logit lens, and direct head contributions."""

from __future__ import annotations

import re

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.norms import at_least_float32
from bridge.analysis.analysis import refuse_no_logit_sum
from bridge.analysis.decomposition import StreamTerms
from bridge.analysis.residual import ResidualMethods
from bridge.arguments import refuse_wrong_types
from bridge.hooks.names import last_stream
from bridge.hooks.studied_bridge import StudiedBridge

__all__ = ["head_contributions", "logit_lens"]

#: The scales of the norms that may be applied to a head's output.
_SCALE = re.compile(r"(blocks\.\d+\.ln\w+|ln_final)\.hook_scale")


@refuse_wrong_types
def logit_lens(
    bridge: StudiedBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer batch pos d_vocab"]:
    """Return the logits that the model would give if it ended before each layer.

    The residual stream before each block, and after the last, is mapped through the model's own
    final norm and unembedding (nostalgebraist 2020, "interpreting GPT: the logit lens"). The result
    is the full tensor of logits, for plots of short prompts; `TransformerBridge.lens` returns most
    likely tokens, ranks and divergences without building it.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.

    Returns:
        ``[n_layers + 1, batch, pos, d_vocab]``; the last entry is the model's own logits.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.logit_lens import logit_lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> logit_lens(bridge, bridge.to_tokens("Mary and")).shape[0] == bridge.cfg.n_layers + 1
        True
    """
    n = bridge.cfg.n_layers
    names = [*(f"blocks.{i}.hook_resid_pre" for i in range(n)), last_stream(bridge.hook_dict, n)]
    _, cache = bridge.run_with_cache(tokens, names_filter=names)
    return torch.stack([bridge(cache[name], start_at_layer=n) for name in names])


@refuse_wrong_types
def head_contributions(
    bridge: StudiedBridge,
    tokens: Int[Tensor, "batch pos"],
    answers: Int[Tensor, " batch"],
    others: Int[Tensor, " batch"],
) -> Float[Tensor, "batch layer head"]:
    """Return each head's direct contribution to a logit difference at the last position.

    Each head's output is mapped through the norms that follow it on its way to the end of the
    stream (after attention in Gemma 2 and 3, on the stream in BERT) and through the final norm,
    with the scales of this run, and multiplied by the difference of two columns of ``W_U`` (direct
    logit attribution, Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). A
    soft cap on the logits is ignored. Layers without attention contribute zero, as do heads that a
    layer does not have.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``, without padding.
        answers, others: the tokens whose logits are added and subtracted, ``[batch]``.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.logit_lens import head_contributions
        >>> bridge = TransformerBridge.boot_embedded()
        >>> one, other = (
        ...     torch.tensor([bridge.to_single_token(name)]) for name in (" Mary", " John")
        ... )
        >>> head_contributions(bridge, bridge.to_tokens("Mary and John"), one, other).shape
        torch.Size([1, 4, 4])
    """
    refuse_no_logit_sum(bridge)
    n = bridge.cfg.n_layers
    layers = [i for i in range(n) if f"blocks.{i}.attn.hook_result" in bridge.hook_dict] or [0]
    results = [f"blocks.{i}.attn.hook_result" for i in layers]
    scales = [name for name in bridge.hook_dict if _SCALE.fullmatch(name)]
    _, cache = bridge.run_with_cache(tokens, names_filter=[*results, *scales], pos_slice=-1)
    assert isinstance(cache, ResidualMethods)  # the request was not for a plain dictionary
    terms = StreamTerms(cache, groups=["attn"], heads=True, post_norms=True).terms
    pairs = answers[:, None], others[:, None]
    of_layers = [
        cache.logit_attrs(at_least_float32(term.value), *pairs, norm_weights=True) for term in terms
    ]
    n_heads = max(map(len, of_layers))  # a layer may have fewer heads than another
    contributions = of_layers[0].new_zeros(len(tokens), n, n_heads)
    for layer, of_heads in zip(layers, of_layers, strict=True):
        contributions[:, layer, : len(of_heads)] = of_heads[:, :, 0].T
    return contributions
