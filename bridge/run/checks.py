"""Refusing input that the model cannot take, before anything runs, in words that say what would work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters.config import ModelConfig
from adapters.paths import token_embedding
from bridge.hooks.modules import TokenEmbedding

_INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def as_tokens(input: Any) -> Tensor:
    """Tokens ``[batch, pos]``, int64, from a tensor of any whole numbers or lists of ids.

    Raises:
        TypeError: it is neither.
        ValueError: it has another number of axes, no rows, no tokens, or rows of different lengths.
    """
    if not isinstance(input, Tensor):
        if not isinstance(input, list | tuple):
            raise TypeError(
                f"the input is {type(input).__name__}; it must be a text, a list of texts, tokens [pos] or "
                "[batch, pos], or embeddings [batch, pos, d_model]"
            )
        input = _from_lists(input)
    if input.dtype not in _INTEGERS:
        raise TypeError(f"tokens must be whole numbers, not {input.dtype}")
    if input.ndim not in (1, 2):
        raise ValueError(f"tokens must be [pos] or [batch, pos], not {list(input.shape)}")
    tokens = input if input.dtype == torch.int64 else input.long()
    if tokens.ndim == 1:
        tokens = tokens.unsqueeze(0)
    if not tokens.numel():
        raise ValueError(
            f"the input has no {'rows' if not tokens.shape[0] else 'tokens'}: its shape is {[*input.shape]}"
        )
    return tokens


def _from_lists(input: Sequence[Any]) -> Tensor:
    if not input:
        raise ValueError("the input has no tokens: the list is empty")
    if isinstance(input[0], Sequence) and not isinstance(input[0], str):
        for index, row in enumerate(input):
            if isinstance(row, str) or not isinstance(row, Sequence):
                raise TypeError(f"row {index} of the input is {row!r}; it must be a list of token ids, as row 0 is")
            _check_ids(row, f"row {index}")
        lengths = [len(row) for row in input]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the rows of the input have {', '.join(map(str, lengths))} tokens; pad them to one length and pass "
                "attention_mask, or pass texts, which are padded"
            )
        if not lengths[0]:
            raise ValueError("the input has no tokens: its rows are empty")
    elif isinstance(input[0], Tensor):
        shapes = {tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__ for row in input}
        if len(shapes) > 1 or any(row.ndim > 1 or row.dtype not in _INTEGERS for row in input):
            raise TypeError(
                f"the input is a list of tensors of shapes {', '.join(map(str, shapes))}; it must be one tensor of "
                "token ids [batch, pos] (torch.stack joins rows of one length)"
            )
        return torch.stack(list(input))
    elif is_chat(input):
        raise TypeError("the input is a chat: bridge.to_tokens(messages) makes tokens of it by the chat template")
    else:
        _check_ids(input, "the input")
    return torch.tensor(input)


def _check_ids(row: Sequence[Any], where: str) -> None:
    for entry in row:
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise TypeError(f"{where} holds {entry!r}; tokens must be whole numbers")


def is_chat(input: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether an input is a chat: a list of messages, each with a role."""
    return isinstance(input, list | tuple) and bool(input) and isinstance(input[0], Mapping) and "role" in input[0]


def check_texts(texts: Any) -> None:
    """Refuses what is no list of texts.

    Raises:
        TypeError: it is none, or holds something else.
    """
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes):
        raise TypeError(f"the input is {texts!r}; it must be a text or a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text {index} is {text!r}, which is no string")


def texts_in(input: Any) -> Sequence[str] | None:
    """The texts that an input is: one, or a list of them. None where it is something else.

    What is behind the first of a list is looked at where the texts become tokens.
    """
    if isinstance(input, Tensor):
        return None
    if isinstance(input, str):
        return [input]
    return input if isinstance(input, list | tuple) and input and isinstance(input[0], str) else None


def as_ids(tokens: Any) -> Tensor:
    """Token ids of any number of axes, from a tensor, an id, or lists of ids.

    Raises:
        TypeError: they are no whole numbers.
        ValueError: an id below zero, or more than a tokenizer can have.
    """
    ids = tokens
    if not isinstance(tokens, Tensor):
        if not isinstance(tokens, list | tuple):
            _check_ids([tokens], "the input")
        one = not isinstance(tokens, list | tuple)
        ids = torch.tensor(tokens) if one else as_tokens(tokens) if tokens else torch.zeros(0, dtype=torch.long)
        if not one and tokens and (not isinstance(tokens[0], Sequence | Tensor) or getattr(tokens[0], "ndim", 1) == 0):
            ids = ids[0]
    if ids.dtype not in _INTEGERS and ids.numel():
        raise TypeError(f"tokens must be whole numbers, not {ids.dtype}")
    ids = ids.long()
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < 2**32):
        raise ValueError(f"token ids are from 0 on, and these go from {int(ids.min())} to {int(ids.max())}")
    return ids


def check_ids(embedding: TokenEmbedding, cfg: ModelConfig, tokens: Tensor, name: str = "the input") -> None:
    """Refuses token ids that have no embedding.

    What is in the memory of an accelerator is not looked at: that would wait for everything under way there.

    Args:
        embedding: finds the token embeddings.
        cfg: the facts about the model.
        tokens: of whole numbers, not empty.
        name: what they are.

    Raises:
        ValueError: there is one.
    """
    if not tokens.is_cpu:
        return
    rows = getattr(embedding.module, "num_embeddings", None)
    rows = cfg.d_vocab if rows is None else rows
    if tokens.ndim == 2 and tokens.numel() <= 256:  # a kernel takes longer to start
        ids = tokens.tolist()
        low, high = min(map(min, ids)), max(map(max, ids))
    else:
        low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= rows:
        bad = low if low < 0 else high
        place = (tokens == bad).nonzero()[0].tolist()
        raise ValueError(
            f"{name} has token id {bad} at {place}; {cfg.model_name} has ids from 0 to d_vocab - 1 = {rows - 1}"
        )


def check_embeddings(core: PreTrainedModel, input: Tensor) -> None:
    """Refuses embeddings that the model's are not like.

    Raises:
        TypeError: another type.
        ValueError: another width, another number of axes, or none of them.
    """
    embedding = token_embedding(core)
    width = getattr(embedding, "embedding_dim", None)
    if input.ndim not in (2, 3) or (width is not None and input.shape[-1] != width):
        wanted = "d_model" if width is None else f"d_model={width}"
        raise ValueError(
            f"embeddings must be [pos, {wanted}] or [batch, pos, {wanted}], not {list(input.shape)}; "
            f"tokens must be whole numbers, and this is {input.dtype}"
        )
    if not input.numel():
        raise ValueError(f"the input has no tokens: the embeddings have shape {list(input.shape)}")
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        _check_type(input, {weight.dtype}, "embeddings")


def check_residual(model: nn.Module, input: Any, d_model: int) -> None:
    """Refuses what cannot be the residual stream of a run that starts at a layer.

    Raises:
        TypeError: another type.
        ValueError: another shape.
    """
    if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] != d_model:
        shape = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(f"with start_at_layer the input is the residual stream, [batch, pos, {d_model}], not {shape}")
    if not input.numel():
        raise ValueError(f"the residual stream is empty: its shape is {list(input.shape)}")
    if not any(p.dtype == input.dtype for p in model.parameters()):  # the first one tells, most often
        _check_type(input, {p.dtype for p in model.parameters() if p.is_floating_point()}, "the residual stream")


def _check_type(input: Tensor, wanted: set[torch.dtype], name: str) -> None:
    if input.dtype not in wanted and not torch.is_autocast_enabled(input.device.type):
        types = " or ".join(sorted(str(dtype) for dtype in wanted))
        raise TypeError(f"{name}: the type is {input.dtype}, and the model computes in {types}; use .to({types})")


def check_whole_logits(return_type: str | None, arguments: Mapping[str, Any]) -> None:
    """Refuses a loss or a prediction of logits of which not all are computed.

    Raises:
        ValueError: it is asked for.
    """
    kept = arguments.get("logits_to_keep")
    if return_type in ("loss", "both", "predictions") and kept is not None and (isinstance(kept, Tensor) or kept != 0):
        raise ValueError(
            f"return_type={return_type!r} needs the logits of every position, and logits_to_keep={kept!r} keeps some: "
            'leave it out, or use return_type="logits"'
        )
