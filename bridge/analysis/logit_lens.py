"""Reading the residual stream in terms of next tokens: the logit lens, and each head's direct contribution."""

from __future__ import annotations

import re

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.norms import at_least_float32
from bridge.analysis.analysis import refuse_no_logit_sum
from bridge.analysis.decomposition import StreamTerms
from bridge.analysis.residual import ResidualMethods
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.asked import StudiedBridge
from bridge.hooks.names import last_stream

__all__ = ["head_contributions", "logit_lens"]

#: The scales of the norms that what a head writes may meet.
_SCALE = re.compile(r"(blocks\.\d+\.ln\w+|ln_final)\.hook_scale")


@refuse_wrong_types
def logit_lens(bridge: StudiedBridge, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "layer batch pos d_vocab"]:
    """The logits that the model would give if it ended before each layer.

    The residual stream before each block, and after the last, goes through the model's own final norm and unembedding
    (nostalgebraist 2020, "interpreting GPT: the logit lens"). This is the whole tensor, for pictures of short prompts;
    `TransformerBridge.lens` reads likeliest tokens, ranks and divergences without it.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.

    Returns:
        ``[n_layers + 1, batch, pos, d_vocab]``; the last are the model's own logits.

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
    """What each head adds directly to the last position's logit of one token over another.

    Each head's output is taken through the norms that follow it on its way to the stream's end (behind attention in
    Gemma 2 and 3, on the stream in BERT) and through the final one, with their scales of this run, and multiplied with
    the difference of the two columns of ``W_U`` (direct logit attribution, Elhage et al. 2021, "A Mathematical
    Framework for Transformer Circuits"). A soft cap on the logits is left out. Layers without attention add zero, as
    do heads that a layer does not have.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``, without padding.
        answers, others: the token whose logit counts for, and the one whose logit counts against, ``[batch]``.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.logit_lens import head_contributions
        >>> bridge = TransformerBridge.boot_embedded()
        >>> one, other = (torch.tensor([bridge.to_single_token(name)]) for name in (" Mary", " John"))
        >>> head_contributions(bridge, bridge.to_tokens("Mary and John"), one, other).shape
        torch.Size([1, 4, 4])
    """
    refuse_no_logit_sum(bridge)
    n = bridge.cfg.n_layers
    layers = [i for i in range(n) if f"blocks.{i}.attn.hook_result" in bridge.hook_dict] or [0]
    results = [f"blocks.{i}.attn.hook_result" for i in layers]
    scales = [name for name in bridge.hook_dict if _SCALE.fullmatch(name)]
    _, cache = bridge.run_with_cache(tokens, names_filter=[*results, *scales], pos_slice=-1)
    assert isinstance(cache, ResidualMethods)  # no plain dictionary was asked for
    terms = StreamTerms(cache, groups=["attn"], heads=True, post_norms=True).terms
    pairs = answers[:, None], others[:, None]
    parts = [cache.logit_attrs(at_least_float32(each.value), *pairs, norm_weights=True) for each in terms]
    found = parts[0].new_zeros(len(tokens), n, max(map(len, parts)))  # a layer may have fewer heads than another
    for layer, part in zip(layers, parts, strict=True):
        found[:, layer, : len(part)] = part[:, :, 0].T
    return found
