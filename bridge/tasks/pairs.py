"""Pairs of prompts of which one leads to another answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from bridge.circuits.metrics import Metric, logit_difference

#: Clean ids, corrupted ids, the answer, the wrong token, and both texts.
Row = tuple[list[int], list[int], int, int, tuple[str, str]]


@dataclass(frozen=True)
class Pairs:
    """Prompts and their corrupted counterparts, all of one length.

    Attributes:
        clean, corrupted: token ids, ``[batch, pos]``.
        answers: the right next token of each clean prompt, ``[batch]``.
        wrong: the token that it is compared with, ``[batch]``.
        texts: the clean and the corrupted text of each.
    """

    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    answers: Int[Tensor, " batch"]
    wrong: Int[Tensor, " batch"]
    texts: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.answers)

    def metric(self) -> Metric:
        """The logit of the answer less that of the wrong token at the last position, mean over the prompts."""
        return logit_difference(self.answers, self.wrong)


@dataclass(frozen=True)
class NumberPairs(Pairs):
    """Prompts that more than one number can follow.

    Attributes:
        numbers: the tokens of all numbers that are compared, ``[number]``.
        larger, smaller: for each prompt, which of them are right and which are wrong, ``[batch, number]``.
    """

    numbers: Int[Tensor, " number"]
    larger: Bool[Tensor, "batch number"]
    smaller: Bool[Tensor, "batch number"]

    def metric(self) -> Metric:
        """The probability of the right numbers less that of the wrong ones, mean over prompts (Hanna et al. 2023)."""
        sign = self.larger.float() - self.smaller.float()

        def metric(logits: Tensor) -> Tensor:
            probabilities = logits[:, -1].softmax(-1)[:, self.numbers.to(logits.device)]
            return (probabilities * sign.to(probabilities)).sum(-1).mean()

        return metric


def paired(rows: Sequence[Row], device: torch.device) -> Pairs:
    """Pairs from token lists.

    Args:
        rows: for each pair the clean ids, the corrupted ids, the answer, the wrong token and both texts.
        device: where to put them.
    """
    clean, corrupted, answers, wrong, texts = zip(*rows, strict=True)
    return Pairs(
        clean=torch.tensor(list(clean), device=device),
        corrupted=torch.tensor(list(corrupted), device=device),
        answers=torch.tensor(list(answers), device=device),
        wrong=torch.tensor(list(wrong), device=device),
        texts=texts,
    )
