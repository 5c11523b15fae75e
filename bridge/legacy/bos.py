"""The token that starts a text: adding and removing it without a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import processors
from torch import Tensor

from bridge.run.tokenization import TokenizerFacts


def get_tokenizer_with_bos(tokenizer: Any) -> Any:
    """A tokenizer that starts every text with BOS by itself: this one, or a copy.

    A model needs none of it: it prepends BOS, once, whatever its tokenizer does.
    """
    if TokenizerFacts(tokenizer).adds_bos:
        return tokenizer
    bos, made = tokenizer.bos_token, copy.deepcopy(tokenizer)
    backend = getattr(made, "backend_tokenizer", None)
    if bos is None or backend is None:
        why = "it has no BOS token" if bos is None else "it is not one of the package tokenizers"
        raise ValueError(f"{type(tokenizer).__name__} cannot start texts with BOS by itself: {why}")
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    before = backend.post_processor
    backend.post_processor = template if before is None else processors.Sequence([before, template])
    return made


def get_input_with_manually_prepended_bos(tokenizer: Any, input: str | list[str]) -> str | list[str]:
    """One text or several, with BOS written in front."""
    return tokenizer.bos_token + input if isinstance(input, str) else [tokenizer.bos_token + text for text in input]


def get_tokens_with_bos_removed(tokenizer: Any, tokens: Int[Tensor, "... pos"]) -> Int[Tensor, "... pos-1"]:
    """Rows of tokens without the BOS that each starts with; where padding is on the right, without the first token.

    Args:
        tokenizer: says on which side is padding, and what BOS and padding are.
        tokens: the rows.

    Raises:
        ValueError: where padding is on the left, a row has no BOS.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from bridge.legacy.utils import get_tokens_with_bos_removed
        >>> tokenizer = SimpleNamespace(padding_side="left", bos_token_id=1, pad_token_id=0)
        >>> get_tokens_with_bos_removed(tokenizer, torch.tensor([[0, 1, 5, 6], [1, 7, 1, 8]]))
        tensor([[0, 5, 6],
                [7, 1, 8]])
    """
    if tokenizer.padding_side == "right":
        return tokens[..., 1:]
    is_bos = tokens == tokenizer.bos_token_id
    if tokenizer.bos_token_id == tokenizer.pad_token_id:
        is_bos = is_bos.long().cumprod(-1).bool()  # those in front: the last of them is BOS, others are padding
        place = is_bos.sum(-1, keepdim=True) - 1
    else:
        place = is_bos.long().argmax(-1, keepdim=True)
    if not bool(is_bos.any(-1).all()):
        raise ValueError(f"a row of the tokens has no BOS (token {tokenizer.bos_token_id})")
    keep = torch.ones_like(tokens, dtype=torch.bool).scatter(-1, place, False)
    return tokens[keep].reshape(*tokens.shape[:-1], -1)
