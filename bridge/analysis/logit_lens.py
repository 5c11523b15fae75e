"""Reading the residual stream in terms of next tokens: the logit lens, and each head's direct contribution."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.norms import at_least_float32
from bridge.analysis.requirements import refuse_no_logit_sum
from bridge.analysis.residual_norms import norm_of, post_norm
from bridge.analysis.runnable import RunnableModel
from bridge.hooks.act_names import last_stream
from bridge.hooks.arguments import refuse_wrong_types


@refuse_wrong_types
def logit_lens(bridge: RunnableModel, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "layer batch pos d_vocab"]:
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
    bridge: RunnableModel,
    tokens: Int[Tensor, "batch pos"],
    answers: Int[Tensor, " batch"],
    others: Int[Tensor, " batch"],
) -> Float[Tensor, "batch layer head"]:
    """What each head adds directly to the last position's logit of one token over another.

    Each head's output is taken through the norm that follows attention, where one does (Gemma 2 and 3), with the scale
    of this run, divided by the scale that the final norm has in this run, and multiplied with the difference
    of the two rows of the unembedding (direct logit attribution, Elhage et al. 2021, "A Mathematical Framework for
    Transformer Circuits"). A soft cap on the logits is left out. Layers without attention add zero.

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
    behind = [post_norm(bridge, i, "attn") for i in layers]  # a norm after attention (Gemma 2 and 3)
    norm = norm_of(bridge, "ln_final")
    scales = [each.scale_name for each in (*behind, norm) if each]
    _, cache = bridge.run_with_cache(tokens, names_filter=[*results, *scales], pos_slice=-1)
    written = []
    for name, after in zip(results, behind, strict=True):
        result = cache[name][:, 0]  # batch head d_model
        written.append(after.linear(result, cache[after.scale_name]) if after else result)
    heads = written[0].new_zeros(len(written[0]), n, *written[0].shape[1:])  # batch layer head d_model
    heads[:, layers] = torch.stack(written, dim=1)
    direction = unembed_difference(bridge, answers, others)
    normalized = norm.linear(heads, cache[norm.scale_name][:, :, None]) if norm else at_least_float32(heads)
    return torch.einsum("blhd,bd->blh", normalized, direction.to(normalized.dtype))


@refuse_wrong_types
def unembed_difference(
    bridge: RunnableModel, answers: Int[Tensor, " batch"], others: Int[Tensor, " batch"]
) -> Float[Tensor, "batch d_model"]:
    """The direction in the final norm's output that raises one token's logit over another's."""
    rows = bridge.weights.unembedding_of
    return at_least_float32(rows(answers) - rows(others))
