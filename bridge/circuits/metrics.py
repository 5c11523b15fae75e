"""Metrics of logits: the difference of two tokens, and the divergence from other logits. Any function will do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.hooks.arguments import refuse_wrong_types

#: From logits ``[batch, pos, d_vocab]`` to one number, in a tensor that has a gradient.
Metric = Callable[[Float[Tensor, "batch pos d_vocab"]], Tensor]


@refuse_wrong_types
def logit_difference(
    answers: Int[Tensor, " batch"], wrong: Int[Tensor, " batch"], position: int | Int[Tensor, " batch"] = -1
) -> Metric:
    """How much higher the right token's logit is than the wrong one's, on average over the prompts.

    Args:
        answers, wrong: a token of each prompt, ``[batch]``.
        position: where to look, for all prompts or for each.

    Raises:
        ValueError: there are not as many wrong tokens as answers.

    Example:
        >>> import torch
        >>> from bridge.circuits import logit_difference
        >>> logit_difference(torch.tensor([1]), torch.tensor([0]))(torch.tensor([[[2.0, 5.0]]])).item()
        3.0
    """
    if answers.shape != wrong.shape:
        raise ValueError(f"there are {len(answers)} answers and {len(wrong)} wrong tokens")

    def metric(logits: Tensor) -> Tensor:
        if logits.shape[0] != len(answers):
            raise ValueError(f"the logits have {logits.shape[0]} rows, and there are {len(answers)} answers")
        rows = torch.arange(len(answers), device=logits.device)
        here = logits[:, position] if isinstance(position, int) else logits[rows, position.to(logits.device)]
        return (here[rows, answers.to(logits.device)] - here[rows, wrong.to(logits.device)]).mean()

    metric.__name__ = "logit_difference"  # what pictures call it
    return metric


@refuse_wrong_types
def kl_divergence(right: Float[Tensor, "batch pos d_vocab"], position: int = -1) -> Metric:
    """The Kullback-Leibler divergence of next-token distributions from the right ones, in nats, mean over the prompts.

    Args:
        right: the logits of the unpatched model.
        position: where to look.

    Example:
        >>> import torch
        >>> from bridge.circuits import kl_divergence
        >>> logits = torch.randn(2, 3, 5)
        >>> kl_divergence(logits)(logits).item()
        0.0
    """
    target = right[:, position].detach().log_softmax(-1)

    def metric(logits: Tensor) -> Tensor:
        found = logits[:, position].log_softmax(-1)
        return (target.exp() * (target - found)).sum(-1).mean()

    metric.__name__ = "kl_divergence"
    return metric
