"""The language-modelling loss of logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy


def lm_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    per_token: bool = False,
) -> Float[Tensor, ""] | Float[Tensor, "batch pos-1"]:
    """Cross-entropy of each next token, in float32 as transformers computes it.

    Args:
        logits: of every position.
        tokens: the tokens that were run.
        attention_mask: 1 for tokens and 0 for padding: where a token or its successor is padding, the loss is 0 and not
            counted.
        per_token: one value for each of the ``pos - 1`` predictions in place of their mean.

    Raises:
        ValueError: there is one token only, or no two adjacent tokens without padding.

    Returns:
        The mean in nats, or ``[batch, pos-1]``.

    Example:
        >>> import torch
        >>> from bridge.run.loss import lm_loss
        >>> lm_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).exp()
        tensor(4.)
    """
    check_counted(tokens, attention_mask)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = cross_entropy(wide[:, :-1].transpose(1, 2), tokens[:, 1:].to(logits.device), reduction="none")
    if attention_mask is not None:
        counted = (attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()).to(losses.dtype)
        losses = losses * counted
        return losses if per_token else losses.sum() / counted.sum()
    return losses if per_token else losses.mean()


def check_counted(tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"] | None = None) -> None:
    """Refuses tokens in which nothing is predicted: a mean over nothing is no number.

    Args:
        tokens: as for `lm_loss`.
        mask: its attention mask.

    Raises:
        ValueError: there is one token only, or no two adjacent tokens without padding.
    """
    if tokens.shape[1] < 2:
        raise ValueError("the loss of a next token needs two tokens at least, and the input has one")
    if mask is not None and not bool((mask[:, :-1].bool() & mask[:, 1:].bool()).any()):
        raise ValueError("the attention mask leaves no two adjacent tokens, so there is no loss to take")
